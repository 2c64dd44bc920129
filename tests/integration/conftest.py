"""Fixtures of the integration tier."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from integration.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import operator_process
from support.process import running
from support.waiting import wait_for

CRDS = Path(__file__).parents[2] / "crds" / "manifests"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, kube-apiserver and kube-controller-manager."""
    with ControlPlane(tmp_path_factory.mktemp("plane")) as found:
        yield found


@pytest.fixture(scope="session")
def kubeconfig(plane: ControlPlane) -> Path:
    """The administrator's kubeconfig."""
    return plane.kubeconfig


@pytest.fixture(scope="session")
def api(kubeconfig: Path) -> Api:
    """The API server with our CRDs."""
    import yaml

    found = Api(kubeconfig)
    crds = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(CRDS.glob("*.yaml"))]
    for crd in crds:
        found.create(crd)
    names = [crd["metadata"]["name"] for crd in crds]
    wait_for("the CRDs are served", lambda: all(_served(found, name) for name in names))
    return found


def _served(api: Api, name: str) -> bool:
    crd = api.get("CustomResourceDefinition", "", name)
    conditions = (crd or {}).get("status", {}).get("conditions") or []
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """A real MLflow server."""
    server = Mlflow(tmp_path_factory.mktemp("mlflow"))
    with running(server):
        yield server


@pytest.fixture
def namespace(api: Api) -> str:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def world(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> Iterator[World]:
    """The operator at work on the test's namespace."""
    log = tmp_path / "operator.log"
    environment = {"FINETUNE_TRACKING_URI": mlflow_server.uri, "FINETUNE_NAMESPACES": namespace}
    operator = operator_process(kubeconfig, log, environment)
    with running(operator):
        yield World(api, mlflow_server, operator, namespace)
    print(log.read_text(encoding="utf-8"))
