"""Stores by their URIs: how their clients log in, and what their errors say."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import pytest
from azure.core.exceptions import ClientAuthenticationError
from azure.identity import CredentialUnavailableError
from botocore.exceptions import NoCredentialsError
from fsspec.implementations.local import LocalFileSystem
from gcsfs.retry import HttpError
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError

from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "abfss://lake@acme.dfs.core.windows.net/models"
CONNECTION = "AccountName=acme;AccountKey=aGlkZGVu;BlobEndpoint=http://127.0.0.1:10000/acme;"
FRESH: dict[str, object] = {"use_listings_cache": False}
NOBODY = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
# URI, environment: fsspec's options, deltalake's options.
LOGINS: dict[str, tuple[str, dict[str, str], dict[str, object], dict[str, str]]] = {
    "a path": ("/models", {"AZURE_STORAGE_KEY": "key"}, {}, {}),
    "S3": ("s3://lake/models", {}, FRESH | {"skip_instance_cache": True}, {}),
    "another S3": (
        "s3a://lake/models",
        {"AWS_ENDPOINT_URL": "http://minio:9000"},
        FRESH | {"skip_instance_cache": True},
        {"AWS_ALLOW_HTTP": "true"},
    ),
    "Google": ("gs://lake/models", {}, FRESH | {"token": "google_default"}, {}),
    "another server for Google": (
        "gs://lake/models",
        {"STORAGE_EMULATOR_HOST": "127.0.0.1:4443"},
        FRESH | {"token": "anon"},
        {
            "google_service_account_key": json.dumps({"gcs_base_url": "http://127.0.0.1:4443"} | NOBODY),
            "allow_http": "true",
        },
    ),
    "the key of an account": (
        AZURE,
        {"AZURE_STORAGE_ACCOUNT": "acme", "AZURE_STORAGE_KEY": "key"},
        FRESH | {"account_name": "acme", "account_key": "key"},
        {"azure_storage_account_name": "acme", "azure_storage_account_key": "key"},
    ),
    "a connection string": (
        AZURE,
        {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION},
        FRESH | {"account_name": "acme", "connection_string": CONNECTION},
        {
            "azure_storage_account_name": "acme",
            "azure_storage_account_key": "aGlkZGVu",
            "azure_storage_endpoint": "http://127.0.0.1:10000/acme",
            "allow_http": "true",
        },
    ),
}


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "STORAGE_EMULATOR_HOST",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_CLIENT_ID",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", LOGINS)
def test_logins(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, environment, options, of_delta = LOGINS[kind]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (filesystems.build_options(uri), filesystems.build_delta_options(uri)) == (options, of_delta)


def test_the_login_of_another_account_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "another")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "key")
    assert list(filesystems.build_options(AZURE)) == ["use_listings_cache", "account_name", "credential"]
    assert filesystems.build_delta_options(AZURE) == {"azure_storage_account_name": "acme"}


@pytest.mark.parametrize("key", ["", "a2V5"], ids=["an identity", "a key"])
def test_the_account_is_that_of_the_uri(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # NB: adlfs reads these by itself.
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", CONNECTION.replace("acme", "another"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGlkZGVu")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=another")
    if key:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acme")
        monkeypatch.setenv("AZURE_STORAGE_KEY", key)
    files, path = filesystems.open_filesystem(AZURE)
    login = (files.connection_string, files.account_key, files.sas_token, files.credential is None)
    assert (path, files.service_client.url) == ("lake/models", "https://acme.blob.core.windows.net/")
    assert login == (None, key or None, None, bool(key))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError("b/nowhere/o"), "b/nowhere/o does not exist"),
        (FileNotFoundError("The specified bucket does not exist."), "The specified bucket does not exist."),
        (OSError("Forbidden: b/lake/o\nno access"), "Forbidden: b/lake/o"),
        (ValueError("no storage"), None),
    ],
)
def test_what_an_error_says(error: Exception, sentence: str | None) -> None:
    assert filesystems.describe_failure(error) == sentence


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (NoCredentialsError(), True),
        (DefaultCredentialsError(), True),
        (CredentialUnavailableError("none"), True),
        # The server of the logins is away, or a login has just ended.
        (TransportError("no route"), False),
        (RefreshError("expired"), False),
        (PermissionError("no access"), False),
    ],
    ids=repr,
)
def test_which_errors_say_that_there_is_no_login(error: Exception, found: bool) -> None:
    assert filesystems.has_no_login(error) is found


# What the server of Google's logins does, and whether the store refuses the login, and what is reported otherwise.
GOOGLE_LOGINS: dict[str, tuple[Exception, bool, str]] = {
    "refuses": (RefreshError("invalid_grant: Invalid JWT Signature.", {}), True, "Invalid Credentials, 401"),
    "is busy": (
        RefreshError("unavailable", {}, retryable=True),
        False,
        "the server of the login does not answer: unavailable",
    ),
    "is away": (
        TransportError("connection refused"),
        False,
        "the server of the login does not answer: connection refused",
    ),
}


@pytest.mark.parametrize(("cause", "is_refused", "sentence"), GOOGLE_LOGINS.values(), ids=GOOGLE_LOGINS)
def test_a_login_of_google_whose_server_is_away_is_not_refused(
    cause: Exception, is_refused: bool, sentence: str
) -> None:
    error = HttpError({"code": 401, "message": "Invalid Credentials"})
    error.__cause__ = cause
    assert (filesystems.is_forbidden(error), filesystems.describe_failure(error)) == (is_refused, sentence)


def test_a_login_of_azure_whose_server_is_away_is_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_CLIENT_ID", "trainer")
    assert filesystems.has_no_login(ClientAuthenticationError("no token")) is False


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalFileSystem, path: str, content: bytes) -> None:
        with self.open(path, "wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    with pytest.raises(OSError, match="No space"):
        filesystems.write_atomically(LocalFileSystem(), str(tmp_path / "file"), b"content")
    assert [*tmp_path.iterdir()] == []
