"""The servers that all workers of the tier share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.controlplane import ControlPlane
from support.api import Api
from support.manifests import parse
from support.mlflow_server import Mlflow
from support.process import running
from support.waiting import wait_for

CRDS = Path(__file__).parents[3] / "crds" / "manifests"


@dataclass(frozen=True)
class Plane:
    """The control plane, as the administrator reaches it."""

    kubeconfig: Path
    kubectl: Path


@contextmanager
def control_plane(folder: Path) -> Iterator[dict[str, Any]]:
    """etcd, kube-apiserver and kube-controller-manager, with our CRDs."""
    with running(ControlPlane(folder)) as plane:
        api = Api(plane.kubeconfig)
        crds = [
            crd for file in sorted(CRDS.glob("*.yaml")) for crd in parse(file.read_text(encoding="utf-8"))
        ]
        for crd in crds:
            api.create(crd)
        names = [crd["metadata"]["name"] for crd in crds]
        wait_for("the CRDs are served", lambda: all(_served(api, name) for name in names))
        yield {"kubeconfig": str(plane.kubeconfig), "kubectl": str(plane.kubectl)}


def _served(api: Api, name: str) -> bool:
    crd = api.get("CustomResourceDefinition", "", name)
    conditions = (crd or {}).get("status", {}).get("conditions") or []
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[dict[str, Any]]:
    """A real MLflow server."""
    with running(Mlflow(folder)) as server:
        yield {"folder": str(folder), "port": server.port}
