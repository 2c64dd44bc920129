"""Object stores on this machine: servers that speak the APIs of S3, Google Cloud Storage and Azure Blob Storage."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster import binaries, npm
from support.ports import free_port, listens
from support.process import Process, running
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ACCOUNT = "devstoreaccount1"
# The account and the key of Azurite, which everybody knows.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Store:
    """A store with an empty bucket.

    Attributes:
        uri: of the bucket.
        env: variables of the pods, with a login.
        wrong: the same with a login that the store refuses; empty where it asks for none.
    """

    uri: str
    env: dict[str, str]
    wrong: dict[str, str]

    @property
    def missing(self) -> str:
        """The URI of a bucket that does not exist."""
        return self.uri.replace("://lake", "://nowhere")


@contextmanager
def s3(folder: Path) -> Iterator[Store]:
    """A gateway of S3 over files in a folder."""
    port = free_port()
    (folder / "data" / "lake").mkdir(parents=True)
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    }
    login = {"ROOT_ACCESS_KEY": env["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": env["AWS_SECRET_ACCESS_KEY"]}
    program = binaries.ensure("versitygw")["versitygw"]
    argv = [str(program), "--port", f"127.0.0.1:{port}", str(folder / "data")]
    with _running(Process("versitygw", argv, folder / "log", login), port):
        yield Store("s3://lake", env, env | {"AWS_SECRET_ACCESS_KEY": "another"})


@contextmanager
def gs(folder: Path) -> Iterator[Store]:
    """A server of Google Cloud Storage, which asks for no login. The bucket has what is in `data/lake` of the folder."""
    port = free_port()
    (folder / "data" / "lake").mkdir(parents=True, exist_ok=True)
    address = f"http://127.0.0.1:{port}"
    options = {
        "-scheme": "http",
        "-host": "127.0.0.1",
        "-port": str(port),
        "-data": str(folder / "data"),
        "-backend": "memory",
        "-external-url": address,
        "-public-host": f"127.0.0.1:{port}",
    }
    program = binaries.ensure("fake-gcs-server")["fake-gcs-server"]
    argv = [str(program), *(part for option in options.items() for part in option)]
    with _running(Process("fake-gcs-server", argv, folder / "log"), port):
        yield Store("gs://lake", {"STORAGE_EMULATOR_HOST": address}, {})


@contextmanager
def azure(folder: Path) -> Iterator[Store]:
    """A server of Azure Blob Storage."""
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    options = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    argv = [*npm.program("azurite-blob"), "--blobPort", str(port), *options]
    with _running(Process("azurite", argv, folder / "log"), port):
        connection = _connection(port, _KEY)
        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container("lake").close()
        yield Store(
            f"abfss://lake@{_ACCOUNT}.dfs.core.windows.net",
            {"AZURE_STORAGE_CONNECTION_STRING": connection},
            {"AZURE_STORAGE_CONNECTION_STRING": _connection(port, "aGlkZGVu")},
        )


def _connection(port: int, key: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
    )


@contextmanager
def _running(server: Process, port: int) -> Iterator[None]:
    with running(server):
        wait_for(server.name, lambda: listens(port), 30, server)
        yield
