"""Volumes of Unity Catalog through the Files API of a Databricks workspace, as a file system of fsspec."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import NotFound, PermissionDenied, Unauthenticated
from databricks.sdk.errors.base import DatabricksError
from fsspec import AbstractFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from databricks.sdk.mixins.files import FilesExt


# Error codes of a login server with status 400, 401 or 403 (RFC 6749, section 5.2; RFC 8693, section 2.2.2).
# NB: the SDK's errors have the code and no HTTP status.
_REFUSALS = re.compile(
    r"\b(access_denied|invalid_(client|grant|request|scope|target)|unauthorized_client|unsupported_grant_type): "
)
# What the SDK reports if it finds no login in the environment.
_NO_LOGIN = "cannot configure default credentials"
# The status in the log of a request whose answer the SDK could not read, for example that of a load balancer.
_UNREADABLE = re.compile(r"\Aunable to parse response\b.*?^< (\d{3}) ", re.DOTALL | re.MULTILINE)
# Errors that the SDK raises, beside its own classes, if the workspace or the login server returns an unexpected answer. Any request
# may call the login server, to renew the login.
_UNEXPECTED = (ValueError, KeyError, NotImplementedError)


class NoLoginError(OSError):
    """The environment has no login to a workspace."""


class VolumesFileSystem(AbstractFileSystem):
    """Files by their absolute path in a workspace, such as /Volumes/main/llm/models/tiny/config.json.

    The login comes from the environment, in the variables of the databricks-sdk. A file is written to a temporary file of this machine, and
    uploaded when it is closed: others see it complete or not at all.

    All methods raise OSError: FileNotFoundError, PermissionError for a login that is refused, NoLoginError without a login.
    """

    protocol = ("volumes",)
    # NB: a cached instance would keep the login that the environment had when the instance was made.
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("volumes://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder; for a file, return its own entry."""
        path = self._strip_protocol(path)
        try:
            with _open_api(path) as files:
                entries = [
                    _build_entry(
                        entry.path or "",
                        entry.file_size,
                        entry.last_modified,
                        folder=bool(entry.is_directory),
                    )
                    for entry in files.list_directory_contents(path)
                ]
        except FileNotFoundError:
            entries = [self._get_file_entry(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the entry of a file or a folder."""
        path = self._strip_protocol(path)
        try:
            return self._get_file_entry(path)
        except FileNotFoundError:
            with _open_api(path) as files:
                files.get_directory_metadata(path)
            return _build_entry(path, size=0, modified=None, folder=True)

    def _get_file_entry(self, path: str) -> dict[str, Any]:
        with _open_api(path) as files:
            metadata = files.get_metadata(path)
        return _build_entry(path, metadata.content_length, metadata.last_modified, folder=False)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is a file or a folder. NB: the method of fsspec returns False for any failure."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        """List all files below a folder. NB: the method of fsspec treats a folder that it is not allowed to list as empty."""
        return super().find(path, maxdepth, withdirs, **{"on_error": "raise", **options})

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it, in a volume that exists."""
        path = self._strip_protocol(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(f"{path} exists")
        try:
            with _open_api(path) as files:
                files.create_directory(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} cannot be created: create the volume {_name_volume(path)}, or correct the path"
            ) from error

    def mkdir(self, path: str, *_: Any, **__: Any) -> None:
        """Make a folder, and those above it: the API makes them all."""
        self.makedirs(path)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        path = self._strip_protocol(path)
        with _open_api(path) as files:
            files.delete(path)

    def rmdir(self, path: str) -> None:
        """Delete an empty folder."""
        path = self._strip_protocol(path)
        with _open_api(path) as files:
            files.delete_directory(path)

    def rm(self, path: str | list[str], recursive: bool = False, **_: Any) -> None:
        """Delete files, or folders with all their contents."""
        for entry_path in [path] if isinstance(path, str) else path:
            if recursive and self.isdir(entry_path):
                entries = self.ls(entry_path)
                self.rm([entry["name"] for entry in entries], recursive=True)
                # NB: a folder that was not created explicitly may disappear with its last file.
                with suppress(FileNotFoundError):
                    self.rmdir(entry_path)
            else:
                self.rm_file(entry_path)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Move a file. The API cannot move files: the file is downloaded, and uploaded under its new name."""
        self.cp_file(path1, path2)
        self.rm_file(path1)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy a file through this machine."""
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Upload a file; a large file is uploaded in parallel parts."""
        path = self._strip_protocol(rpath)
        with _open_api(path) as files:
            files.upload_from(path, lpath, overwrite=True)

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Download a file."""
        path = self._strip_protocol(rpath)
        with _open_api(path) as files:
            # NB: in SDK 0.156, parallel downloads switch from the store's own addresses to the API at their first part,
            # so this download is not parallel.
            files.download_to(path, lpath)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedIOBase:
        """Open a temporary file: a copy of the file to read, or the content of the file to write."""
        if mode == "wb":
            return _Upload(lambda file: self.put_file(str(file), path))
        if mode != "rb":
            raise ValueError(
                f"{path} cannot be opened with mode {mode}: files of volumes are read or written whole"
            )
        local = _create_temporary_file()
        try:
            self.get_file(path, str(local))
            return local.open("rb")
        finally:
            # NB: the open file remains readable until it is closed.
            local.unlink()


class _Upload(io.BufferedRandom):
    """A temporary file that is uploaded when it is closed, unless its `with` block failed."""

    def __init__(self, send: Callable[[Path], None]) -> None:
        self._local, self._send, self._failed = _create_temporary_file(), send, False
        super().__init__(io.FileIO(self._local, "w+"))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = kind is not None
        self.close()

    def close(self) -> None:
        """Upload the file."""
        if self.closed:
            return
        try:
            super().close()
            if not self._failed:
                self._send(self._local)
        finally:
            self._local.unlink()


def _create_temporary_file() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="volume-")
    os.close(descriptor)
    return Path(name)


def _build_entry(path: str, size: int | None, modified: int | str | None, *, folder: bool) -> dict[str, Any]:
    """Return fsspec's entry for a file or a folder."""
    kind = "directory" if folder else "file"
    return {"name": path.rstrip("/"), "size": int(size or 0), "type": kind, "LastModified": modified}


@contextmanager
def _open_api(path: str) -> Iterator[FilesExt]:
    """Yield the API for a path.

    Raises:
        OSError: as the methods of `VolumesFileSystem`.
    """
    try:
        environment = {name: value for name, value in os.environ.items() if name.startswith("DATABRICKS_")}
        yield _create_client(frozenset(environment.items())).files
    except NotFound as error:
        raise FileNotFoundError(f"{path} does not exist") from error
    except Unauthenticated as error:
        raise PermissionError(
            f"Databricks rejected the pod's credentials for {path}: renew the Secret of tracking"
        ) from error
    except PermissionDenied as error:
        raise PermissionError(
            f"the pod's credentials have no access to {path}: grant these credentials READ VOLUME and WRITE VOLUME on "
            f"{_name_volume(path)}, and USE CATALOG and "
            "USE SCHEMA above it"
        ) from error
    except DatabricksError as error:
        raise OSError(f"{path}: {_describe_error(error)}") from error
    except _UNEXPECTED as error:
        raise _classify_error(path, error) from error


def _describe_error(error: DatabricksError) -> str:
    """Return what the workspace answered. NB: for an unreadable answer, the SDK writes a page that asks for a bug report."""
    unreadable = _UNREADABLE.search(str(error))
    return f"the workspace answered with HTTP status {unreadable[1]}" if unreadable else str(error)


def _classify_error(path: str, error: Exception) -> OSError:
    """Return the error of a missing or refused login; for any other error an OSError, after which a retry may succeed."""
    text = str(error) or type(error).__name__
    if _NO_LOGIN in text:
        return NoLoginError(
            "a volume of Unity Catalog requires credentials for its workspace: set tracking.uri to databricks"
        )
    if _REFUSALS.search(text):
        return PermissionError(f"the login to Databricks for {path} failed: {text}")
    return OSError(f"{path}: {text}")


@cache
def _create_client(_environment: frozenset[tuple[str, str]]) -> WorkspaceClient:
    """Return a client with the login in the environment, which the SDK reads itself; the argument is the cache key."""
    return WorkspaceClient(product="finetune-trainer")


def _name_volume(path: str) -> str:
    """Return the full name of the volume of a path: catalog.schema.volume."""
    return ".".join(path.split("/")[2:5])
