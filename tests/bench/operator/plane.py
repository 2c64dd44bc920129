"""The servers: a control plane without kubelets for each contender, and one MLflow server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.operator.api import Client, Json, RequestError, kubernetes_client
from bench.operator.requests import audit_policy
from bench.promotions.writes import Tail
from cluster.controlplane import ControlPlane
from support.process import running
from support.waiting import wait_for

_CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass
class Plane:
    """A control plane with nothing in it but the CRDs and the namespaces of fleets.

    Attributes:
        kubeconfig: of the contender, whose requests are in the audit log.
        audit: the audit log.
    """

    control_plane: ControlPlane
    client: Client
    kubeconfig: Path
    audit: Path
    _namespaces: int = field(default=0)

    def tail(self) -> Tail:
        """The audit log from now on."""
        return Tail(self.audit)

    def pids(self) -> list[int]:
        """The processes of the control plane."""
        return [process.pid for process in self.control_plane.processes if process.pid is not None]

    def create_namespace(self) -> str:
        """A new namespace in which pods can be created; its name."""
        self._namespaces += 1
        name = f"fleet-{self._namespaces}"
        self.client.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        # NB: no pod can be created in a namespace before its default service account is there.
        for path in (f"{name}/serviceaccounts/default", f"{name}/configmaps/kube-root-ca.crt"):
            wait_for(path, lambda path=path: exists(self.client, f"/api/v1/namespaces/{path}"), 60)  # type: ignore[misc]
        return name


@contextmanager
def start_plane(folder: Path, user: str, crds: list[Path]) -> Iterator[Plane]:
    """A new control plane for one contender.

    Args:
        user: the contender's name in the audit log.
        crds: files with the CRDs that it needs.
    """
    folder.mkdir(parents=True)
    policy, audit = folder / "audit-policy.yaml", folder / "audit.log"
    policy.write_text(audit_policy(user), encoding="utf-8")
    flags = {"audit-policy-file": str(policy), "audit-log-path": str(audit)}
    with running(ControlPlane(folder / "plane", apiserver_flags=flags)) as control_plane:
        authority = control_plane.authority
        bench = authority.issue("bench", "bench", "system:masters")
        client = kubernetes_client(control_plane.server, authority.own.certificate, bench)
        pair = authority.issue("contender", user, "system:masters")
        kubeconfig = authority.kubeconfig(folder / "kubeconfig", control_plane.server, pair)
        _create_crds(client, crds)
        yield Plane(control_plane, client, kubeconfig, audit)


def exists(client: Client, path: str) -> bool:
    """Whether the API server has an object or serves a resource."""
    try:
        client.call("GET", path)
    except RequestError:
        return False
    return True


def _create_crds(client: Client, crds: list[Path]) -> None:
    for file in crds:
        for crd in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            client.call("POST", _CRD_PATH, crd)
            path = _resource_path(crd)
            wait_for(f"{path} is served", lambda path=path: exists(client, path), 60)  # type: ignore[misc]


def _resource_path(crd: Json) -> str:
    spec = crd["spec"]
    return f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
