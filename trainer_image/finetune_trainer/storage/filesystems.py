"""Folders on a volume or in an object store: S3, Google Cloud Storage, Azure Data Lake Storage, volumes of Unity Catalog."""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from finetune_trainer.pod.exit_status import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsspec import AbstractFileSystem

_S3, _GS, _AZURE = ("s3", "s3a"), "gs", "abfss"
_SCHEMES = (*_S3, _GS, _AZURE)
PART = ".tmp"
"""Suffix of a file that `write_atomically` is writing on a volume; a killed pod leaves the file behind."""
# Clients of object stores raise errors that are not OSError.
_CLIENTS = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "s3fs"})
_UNAUTHORIZED = (401, 403)
_NOT_IMPLEMENTED = 501
# Classes of the clients' errors if the environment has no login.
_NO_LOGIN = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "NoLoginError"}
)
_MAX_MESSAGE_CHARS = 300
_VOLUMES = "/Volumes/"
# The ends of the names of Azure's hosts, after the name of the account.
_HOSTS = (".dfs.core.windows.net", ".blob.core.windows.net")
# Loggers of clients that log every error, even an error that is raised, or retried with success.
_NOISY_LOGGERS = ("gcsfs", "azure")


def open_filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URI, and the path in it.

    Logins come from the environment, in the variables of each cloud's tools.
    """
    import fsspec

    if is_in_unity_catalog(uri):
        from finetune_trainer.storage.unity_volumes import VolumesFileSystem

        return VolumesFileSystem(), uri
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    files, path = fsspec.url_to_fs(uri, **build_options(uri))
    return files, path


def build_options(uri: str) -> dict[str, Any]:
    """Return fsspec's options for a URI."""
    scheme = urlparse(uri).scheme
    if scheme not in _SCHEMES:
        return {}
    # NB: the clients cache listings, which would hide what other ranks, pods and attempts write here.
    fresh = {"use_listings_cache": False}
    if scheme == _GS:
        # NB: without this option, the client tries all logins in turn, and finally goes on without one.
        return fresh | {"token": "anon" if _emulator_address() else "google_default"}
    if scheme == _AZURE:
        _register_azure()
        return (
            fresh
            | {"account_name": _parse_account(uri)}
            | (_find_azure_login(uri) or {"credential": _create_azure_identity()})
        )
    # NB: s3fs reads the endpoint and the login from the environment only when a client is made, so no earlier client is reused.
    return fresh | {"skip_instance_cache": True}


def is_object_store(uri: str) -> bool:
    """Return whether a URI is read through an API, not as a local path: in an object store, or a Unity Catalog volume."""
    return urlparse(uri).scheme in _SCHEMES or is_in_unity_catalog(uri)


def is_in_unity_catalog(uri: str) -> bool:
    """Return whether a path is in a Unity Catalog volume that is not mounted on this machine; Databricks mounts volumes."""
    # The first five parts are the path of the volume: /, Volumes, the catalog, the schema and the volume.
    return uri.startswith(_VOLUMES) and not Path(*Path(uri).parts[:5]).is_dir()


def build_delta_options(uri: str) -> dict[str, str]:
    """Return the options with which deltalake reads a table at a URI."""
    scheme = urlparse(uri).scheme
    if scheme in _S3:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        return {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {}
    if scheme == _GS and _emulator_address():
        # deltalake reads the address of an emulator, and that it needs no login, from a service account's key.
        key = {
            "gcs_base_url": _emulator_address(),
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"google_service_account_key": json.dumps(key), "allow_http": "true"}
    if scheme == _AZURE:
        login = _find_azure_login(uri)
        connection = (
            _parse_connection_string(login["connection_string"]) if "connection_string" in login else {}
        )
        azure_options = {
            "azure_storage_account_name": _parse_account(uri),
            "azure_storage_account_key": login.get("account_key") or connection.get("AccountKey", ""),
            "azure_storage_endpoint": connection.get("BlobEndpoint", ""),
            "allow_http": "true" if connection.get("BlobEndpoint", "").startswith("http://") else "",
        }
        return {name: value for name, value in azure_options.items() if value}
    return {}


def describe_logins(uri: str) -> str:
    """Return the variables with a login to the store of a URI, as part of a sentence."""
    scheme = urlparse(uri).scheme
    if uri.startswith(_VOLUMES):
        return "tracking.uri to databricks, or DATABRICKS_HOST and DATABRICKS_TOKEN"
    if scheme == _GS:
        return "GOOGLE_APPLICATION_CREDENTIALS"
    if scheme == _AZURE:
        return "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"
    return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def name_container(uri: str) -> str:
    """Return what a store calls the outermost folder of a URI."""
    return "volume" if uri.startswith(_VOLUMES) else "bucket"


def _emulator_address() -> str:
    """Return the address of an emulator of Google Cloud Storage; empty if there is none."""
    address = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    lacks_scheme = address and "://" not in address
    return f"http://{address}" if lacks_scheme else address


def _find_azure_login(uri: str) -> dict[str, str]:
    """Return the environment's key or connection string for the account of a URI; empty if the environment has neither."""
    account, key = _parse_account(uri), os.environ.get("AZURE_STORAGE_KEY")
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if _parse_connection_string(connection).get("AccountName") == account:
        return {"connection_string": connection}
    if key and os.environ.get("AZURE_STORAGE_ACCOUNT") == account:
        return {"account_key": key}
    return {}


@cache
def _register_azure() -> None:
    """Make fsspec open abfss:// only with the login that it is given, whatever the environment has for other accounts."""
    import fsspec

    from finetune_trainer.storage.azure import AccountFiles

    fsspec.register_implementation(_AZURE, AccountFiles, clobber=True)


@cache
def _create_azure_identity() -> Any:
    """Return a service principal or workload identity of the environment, or the identity of the node."""
    from azure.identity.aio import DefaultAzureCredential

    logins_of_people = ("cli", "developer_cli", "powershell", "shared_token_cache", "visual_studio_code")
    return DefaultAzureCredential(**{f"exclude_{name}_credential": True for name in logins_of_people})


def _parse_account(uri: str) -> str:
    host = urlparse(uri).hostname or ""
    return next((host.removesuffix(end) for end in _HOSTS if host.endswith(end)), host)


def _parse_connection_string(connection: str) -> dict[str, str]:
    """Return the parts of a connection string of Azure."""
    return dict(part.split("=", 1) for part in connection.split(";") if "=" in part)


def is_missing(error: BaseException) -> bool:
    """Whether a store says that it has no such bucket or object."""
    return isinstance(error, FileNotFoundError) or getattr(error, "status_code", None) == 404


def is_forbidden(error: BaseException) -> bool:
    """Whether a store refuses the login."""
    if _find_silent_login_server(error) is not None:
        return False
    # NB: gcsfs has no error class for a refused login.
    is_gcs_refusal = isinstance(error, OSError) and str(error).startswith("Forbidden: ")
    status = getattr(error, "status_code", getattr(error, "code", None))
    return is_gcs_refusal or isinstance(error, PermissionError) or status in _UNAUTHORIZED


def has_no_login(error: BaseException) -> bool:
    """Return whether a client has no login to a store. A login whose server does not answer counts as a login: it may work later."""
    class_names = {kind.__name__ for kind in type(error).__mro__}
    if not class_names.isdisjoint(_NO_LOGIN):
        return True
    # NB: Azure's client raises the same error if there is no login, and if the server of a login does not answer. The
    # environment of such a login has AZURE_CLIENT_ID.
    is_ambiguous = "ClientAuthenticationError" in class_names and not is_forbidden(error)
    return is_ambiguous and not os.environ.get("AZURE_CLIENT_ID")


def _find_silent_login_server(error: BaseException) -> BaseException | None:
    """Return the error of Google's client that the server of its logins does not answer; None for any other error.

    NB: gcsfs raises the same error, with status 401, if that server refuses the login and if it does not answer.
    """
    return next(
        (
            cause
            for cause in _iterate_causes(error)
            if type(cause).__module__.startswith("google.auth.")
            and (type(cause).__name__ == "TransportError" or getattr(cause, "retryable", False))
        ),
        None,
    )


def describe_failure(error: BaseException) -> str | None:
    """Return the message of a storage error (no space, no permission, no connection); None for any other error.

    The causes of the error are checked too: torch's archives raise an error of their own when a file cannot be written.
    """
    silence = _find_silent_login_server(error)
    if silence is not None:
        # NB: the text of an error with an answer of the server is a tuple.
        text = first_line(silence.args[0] if silence.args else silence)
        return f"the server of the login does not answer: {text}"[:_MAX_MESSAGE_CHARS]
    for cause in _iterate_causes(error):
        if isinstance(cause, OSError):
            return cause.strerror or _describe_os_error(cause)
        if type(cause).__module__.split(".")[0] in _CLIENTS:
            return first_line(cause)[:_MAX_MESSAGE_CHARS]
    return None


def make_folder(files: AbstractFileSystem, path: str) -> None:
    """Make a folder. Do nothing in an object store, which has no folders: its client would create a missing bucket."""
    if _has_folders(files):
        files.makedirs(path, exist_ok=True)


def remove_empty_folder(files: AbstractFileSystem, path: str) -> None:
    """Delete a folder if it is empty; an object store has no empty folders."""
    if not _has_folders(files):
        return
    with suppress(OSError):
        # NB: if something is written to the folder after `ls`, `rmdir` fails, and the folder stays.
        if not files.ls(path, detail=False):
            files.rmdir(path)


def _has_folders(files: AbstractFileSystem) -> bool:
    return "file" in files.protocol or "volumes" in files.protocol


def list_files(files: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Return the store's entry for each file in a folder and below, by the name of the file.

    NB: a web console that makes a folder writes an empty object whose name ends in a slash. Such objects are left out.
    """
    entries: dict[str, dict[str, Any]] = files.find(path, detail=True)
    return {name: entry for name, entry in entries.items() if not name.endswith("/")}


def write_atomically(files: AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file so that others see it complete or not at all. Object stores always write so."""
    if "file" not in files.protocol:
        files.pipe_file(path, content)
        return
    # NB: two pods may write the same file at the same time.
    part = f"{path}.{secrets.token_hex(4)}{PART}"
    try:
        files.pipe_file(part, content)
        files.mv(part, path)
    except OSError:
        with suppress(OSError):
            files.rm_file(part)
        raise


def create_file(files: AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file that does not exist yet: only one of several writers succeeds.

    NB: on a volume, others may see it empty for a moment, or for good if the pod is killed then. In a store without conditional
    writes, every writer succeeds, and the last one wins.

    Raises:
        FileExistsError: the file exists.
    """
    if "file" in files.protocol:
        with Path(path).open("xb") as file:
            file.write(content)
        return
    try:
        files.pipe_file(path, content, mode="create")
    except Exception as error:
        if not _lacks_conditional_writes(error):
            raise
        files.pipe_file(path, content)


def _lacks_conditional_writes(error: Exception) -> bool:
    """Whether a store that speaks the API of S3 lacks conditional writes."""
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("ResponseMetadata", {}).get("HTTPStatusCode") == _NOT_IMPLEMENTED)


@contextmanager
def tolerate_failures(consequence: str) -> Iterator[None]:
    """If the block fails with a storage error, print `consequence` and the error, and continue; any other error is raised."""
    try:
        yield
    except Exception as error:
        reason = describe_failure(error)
        if reason is None:
            raise
        print(f"{consequence}: {reason}", flush=True)


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _describe_os_error(error: OSError) -> str:
    # NB: for a missing file, the message of some clients is only the file's name.
    line = first_line(error)[:_MAX_MESSAGE_CHARS]
    return f"{line} does not exist" if isinstance(error, FileNotFoundError) and " " not in line else line
