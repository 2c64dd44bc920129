"""The servers, and the operator as a process, as fixtures. Workers of pytest-xdist share the servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, watching
from support.process import running
from support.shared import shared
from worlds.processes.operators import SharedOperator, new_namespace
from worlds.processes.servers import Plane
from worlds.processes.world import OwnWorld, World

# The fixtures, which a conftest takes all together.
__all__ = [
    "api",
    "kubeconfig",
    "mlflow_server",
    "namespace",
    "own_world",
    "plane",
    "shared_folder",
    "shared_operator",
    "world",
]


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run of pytest see."""
    base_folder = tmp_path_factory.getbasetemp()
    return base_folder.parent if hasattr(request.config, "workerinput") else base_folder


@pytest.fixture(scope="session")
def plane(shared_folder: Path) -> Iterator[Plane]:
    """etcd, kube-apiserver and kube-controller-manager, with our CRDs."""
    with shared(shared_folder, "worlds.processes.servers:control_plane") as server:
        yield Plane(Path(server["kubeconfig"]), Path(server["kubectl"]))


@pytest.fixture(scope="session")
def kubeconfig(plane: Plane) -> Path:
    """The administrator's kubeconfig."""
    return plane.kubeconfig


@pytest.fixture(scope="session")
def api(kubeconfig: Path) -> Api:
    """The API server with our CRDs."""
    return Api(kubeconfig)


@pytest.fixture(scope="session")
def mlflow_server(shared_folder: Path) -> Iterator[Mlflow]:
    """A real MLflow server."""
    with shared(shared_folder, "worlds.processes.servers:mlflow_server") as server:
        yield Mlflow(Path(server["folder"]), port=server["port"])


@pytest.fixture(scope="session")
def shared_operator(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedOperator]:
    """The operator of the tests that do not end it."""
    settings = {"FINETUNE_TRACKING_URI": mlflow_server.uri, "FINETUNE_REGISTRATION_PATIENCE_SECONDS": "5"}
    operator = SharedOperator(api, kubeconfig, tmp_path_factory.mktemp("operator"), settings)
    yield operator
    operator.stop()


@pytest.fixture
def namespace(api: Api) -> str:
    """A new namespace, which no operator watches unless the test starts one."""
    return new_namespace(api)


@pytest.fixture
def world(api: Api, mlflow_server: Mlflow, shared_operator: SharedOperator) -> Iterator[World]:
    """A new namespace, watched by the operator that this worker's tests share."""
    namespace = shared_operator.namespace()
    log = shared_operator.log()
    before = log.stat().st_size
    processes = World(api, mlflow_server, namespace)
    yield processes
    processes.delete_all()
    print(log.read_text(encoding="utf-8")[before:])


@pytest.fixture
def own_world(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> Iterator[OwnWorld]:
    """A new namespace and a new operator, which the test may end."""
    log = tmp_path / "operator.log"
    environment = watching(namespace, mlflow_server.uri, resync_seconds=1)
    operator = forked_operator(kubeconfig, log, environment)
    with running(operator):
        yield OwnWorld(api, mlflow_server, namespace, operator)
    print(log.read_text(encoding="utf-8"))
