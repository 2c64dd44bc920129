"""A stand-in Databricks workspace and a stand-in Hub on this machine, which the pods of the cluster reach.

The workspace's external location is the cluster's object store: a run writes what the pods read. Its clusters take models from
the stand-in Hub, and so do the pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyarrow.dataset import dataset

from cluster import backends
from demo.install import BASE_MODEL, NAMESPACE
from demo.kubectl import Json, Kubectl
from e2e.hand import Hand
from fixtures.fake_databricks import Workspace, running
from fixtures.fake_hub import Hub, Repository
from support.http_server import serving
from support.jars import jars_folder

# Secrets by name, with the token of each in the workspace.
_LOGINS = {"databricks": "dapi-operator", "databricks-trainer": "dapi-trainer"}


@dataclass(frozen=True)
class Place:
    """What a job on Databricks finds.

    Attributes:
        hub: address of the stand-in Hub.
    """

    workspace: Workspace
    hub: str


@contextmanager
def reachable(cluster: str, hand: Hand, model: str, folder: Path) -> Iterator[Place]:
    """A workspace and a Hub while inside.

    Args:
        cluster: the name of the cluster.
        hand: reaches its object store.
        model: the id that the demo's base model has in the Hub.
        folder: for the tables of the workspace.
    """
    host = backends.BACKENDS[backends.choose()[0]].status(cluster).get("hostAddressForPods")
    if host is None:
        pytest.skip("pods reach this machine from a local cluster alone")
    workspace = Workspace(tokens={*_LOGINS.values()})
    workspace.tracking.open()
    workspace.jobs.jars = str(jars_folder())
    workspace.jobs.conf = _external_location(hand)
    hub = Hub(models={model: Repository(_files(hand, BASE_MODEL))})
    with serving(hub, interface=str(host)) as address, running(workspace, interface=str(host)):
        workspace.jobs.environment = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(folder / "hub")}
        yield Place(workspace, address)


def create_table(workspace: Workspace, name: str, rows: pa.Table, folder: Path) -> None:
    """Create a Delta table in the workspace."""
    write_deltalake(str(folder), rows)
    workspace.jobs.tables[name] = str(folder)


def create_bucket(hand: Hand, name: str) -> None:
    """Create a bucket in the object store, unless it exists."""
    _store(hand).makedirs(name, exist_ok=True)


def parquet(hand: Hand, url: str, columns: list[str]) -> list[Json]:
    """Some columns of the Parquet files in a folder of the object store."""
    rows: list[Json] = (
        dataset(url.removeprefix("s3://"), filesystem=_store(hand)).to_table(columns).to_pylist()
    )
    return rows


def create_secrets(kubectl: Kubectl, workspace: Workspace, lake: str) -> None:
    """Create the Secrets of the workspace's logins, and one of that name with the credentials of the object store."""
    credentials = kubectl.get("secret", "s3-credentials", "--namespace", NAMESPACE)
    assert credentials is not None
    contents: dict[str, Any] = {lake: {"data": credentials["data"]}}
    for name, token in _LOGINS.items():
        contents[name] = {"stringData": {"DATABRICKS_HOST": workspace.uri, "DATABRICKS_TOKEN": token}}
    for name, content in contents.items():
        meta = {"name": name, "namespace": NAMESPACE}
        kubectl.apply(json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": meta, **content}))


def _external_location(hand: Hand) -> dict[str, str]:
    """Settings with which every session of the workspace reaches s3:// without credentials of its own."""
    options = {
        "s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        "s3a.endpoint": hand.storage["AWS_ENDPOINT_URL"],
        "s3a.endpoint.region": hand.storage["AWS_REGION"],
        "s3a.path.style.access": "true",
        "s3a.connection.ssl.enabled": "false",
        "s3a.access.key": hand.storage["AWS_ACCESS_KEY_ID"],
        "s3a.secret.key": hand.storage["AWS_SECRET_ACCESS_KEY"],
    }
    return {f"spark.hadoop.fs.{name}": value for name, value in options.items()}


def _files(hand: Hand, url: str) -> dict[str, bytes]:
    """The files of a folder of the object store, by name."""
    store, folder = _store(hand), url.removeprefix("s3://")
    return {path.removeprefix(f"{folder}/"): store.cat_file(path) for path in store.find(folder)}


def _store(hand: Hand) -> Any:
    settings = hand.storage
    return fsspec.filesystem(
        "s3",
        key=settings["AWS_ACCESS_KEY_ID"],
        secret=settings["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=settings["AWS_ENDPOINT_URL"],
    )
