"""A real Argo CD beside a cluster: application controller, repo server and Redis, as processes, with no container.

    with running(ControlPlane(folder / "plane")) as plane, running(ArgoCD(plane.kubeconfig, folder)) as argocd:
        ...  # Applications in namespace argocd.NAMESPACE, their destination argocd.server

It runs without Argo CD's user interface and API server: Applications are created and read through Kubernetes.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster import binaries, packages
from cluster.controlplane import arguments
from cluster.process import run
from support.ports import free_port, listens
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMESPACE = "argocd"
NEEDED = (packages.Package("redis-server", ("redis-server",)), packages.Package("git", ("git",)))


class ArgoCD:
    """Argo CD in one folder, for one cluster.

    It runs within `running()`, and ends with it, also when the body fails or the process is killed; what
    it wrote to the cluster stays there.

    Args:
        kubeconfig: of an administrator.
        directory: holds everything: clones of repositories, logs.
    """

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        self.kubeconfig = kubeconfig
        self.directory = directory
        self._program = binaries.path("argocd")
        self._ports = {name: free_port() for name in ("redis", "repo", "repo-metrics", "controller-metrics")}
        self._credentials = self._read_credentials()
        self.server = str(self._credentials["cluster"]["server"])
        self.redis = self._redis()
        self.repo_server = self._repo_server()
        self.controller = self._controller()

    def start(self, timeout: float = 60) -> None:
        """Put its resources into the cluster and start it."""
        packages.ensure(*NEEDED)
        for folder in ("home", "tmp", "redis", "tls", "ssh"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        self._install()
        try:
            for process, port in (
                (self.redis, "redis"),
                (self.repo_server, "repo"),
                (self.controller, "controller-metrics"),
            ):
                process.start()
                wait_for(process.name, partial(listens, self._ports[port]), timeout, process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End its processes, and forget what it cloned."""
        for process in (self.controller, self.repo_server, self.redis):
            process.stop()
        shutil.rmtree(self.directory / "tmp", ignore_errors=True)

    def _kubectl(self, *argv: str, stdin: str | None = None, check: bool = True) -> str:
        kubectl = [str(binaries.path("kubectl")), "--kubeconfig", str(self.kubeconfig)]
        return run(*kubectl, *argv, stdin=stdin, check=check, timeout=120)

    def _read_credentials(self) -> dict[str, Any]:
        shown = self._kubectl("config", "view", "--raw", "--flatten", "--minify", "--output", "json")
        kubeconfig = json.loads(shown)
        return {"cluster": kubeconfig["clusters"][0]["cluster"], "user": kubeconfig["users"][0]["user"]}

    def _install(self) -> None:
        """What Argo CD's own manifests install, less what runs in pods."""
        manifests = self._program.parent / "manifests"
        apply = ("apply", "--server-side", "--force-conflicts")
        for file in sorted((manifests / "crds").glob("*-crd.yaml")):
            self._kubectl(*apply, "--filename", str(file))
        for kind in ("applications", "appprojects"):
            wait_for(f"the CRD of {kind}", partial(self._serves, kind), 60)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self._kubectl(*apply, "--filename", "-", stdin=json.dumps(namespace))
        for file in sorted((manifests / "base" / "config").glob("argocd-*.yaml")):
            self._kubectl(*apply, "--namespace", NAMESPACE, "--filename", str(file))
        # NB: without the key, which its API server would make, Argo CD passes over every later change of argocd-cm.
        key = json.dumps({"stringData": {"server.secretkey": secrets.token_hex(32)}})
        patch = ("patch", "secret", "argocd-secret", "--namespace", NAMESPACE, "--patch-file", "/dev/stdin")
        self._kubectl(*patch, stdin=key)
        for body in (self._project(), self._cluster()):
            self._kubectl(*apply, "--filename", "-", stdin=json.dumps(body))

    def _serves(self, kind: str) -> bool:
        path = f"/apis/argoproj.io/v1alpha1/{kind}"
        return self._kubectl("get", "--raw", path, check=False) != ""

    @staticmethod
    def _project() -> dict[str, Any]:
        """The project of Applications that name none, as Argo CD's API server would make it."""
        everything = {"group": "*", "kind": "*"}
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "AppProject",
            "metadata": {"name": "default", "namespace": NAMESPACE},
            "spec": {
                "sourceRepos": ["*"],
                "destinations": [{"server": "*", "namespace": "*"}],
                "clusterResourceWhitelist": [everything],
            },
        }

    def _cluster(self) -> dict[str, Any]:
        """The cluster, by the address at which it is reached from outside."""
        cluster, user = self._credentials["cluster"], self._credentials["user"]
        tls = {
            "caData": cluster.get("certificate-authority-data"),
            "certData": user.get("client-certificate-data"),
            "keyData": user.get("client-key-data"),
        }
        config = {"tlsClientConfig": {key: value for key, value in tls.items() if value}}
        if user.get("token"):
            config["bearerToken"] = user["token"]
        data = {"name": "cluster", "server": self.server, "config": json.dumps(config)}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": "cluster",
                "namespace": NAMESPACE,
                "labels": {"argocd.argoproj.io/secret-type": "cluster"},
            },
            "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
        }

    def _process(self, name: str, argv: Sequence[str], **environment: str) -> Process:
        private_folders = {"HOME": str(self.directory / "home"), "TMPDIR": str(self.directory / "tmp")}
        return Process(
            name, argv, self.directory / "logs" / f"{name}.log", {**private_folders, **environment}
        )

    def _redis(self) -> Process:
        argv = ["redis-server", "--bind", "127.0.0.1", "--port", str(self._ports["redis"])]
        argv += ["--dir", str(self.directory / "redis"), "--save", ""]
        return self._process("redis", argv)

    def _repo_server(self) -> Process:
        flags = {
            "address": "127.0.0.1",
            "port": str(self._ports["repo"]),
            "metrics-address": "127.0.0.1",
            "metrics-port": str(self._ports["repo-metrics"]),
            "redis": f"127.0.0.1:{self._ports['redis']}",
            "disable-tls": "true",
        }
        return self._process(
            "argocd-repo-server",
            [str(self._program.parent / "argocd-repo-server"), *arguments(flags)],
            # It runs helm for the Applications that are charts.
            PATH=f"{binaries.path('helm').parent}:{os.environ.get('PATH', '')}",
            ARGOCD_GPG_ENABLED="false",
            ARGOCD_ASK_PASS_SOCK=str(self.directory / "ask-pass.sock"),
            ARGOCD_TLS_DATA_PATH=str(self.directory / "tls"),
            ARGOCD_SSH_DATA_PATH=str(self.directory / "ssh"),
        )

    def _controller(self) -> Process:
        flags = {
            "kubeconfig": str(self.kubeconfig),
            "namespace": NAMESPACE,
            # NB: it has no flag for the address and listens on all, for metrics and for nothing else.
            "metrics-port": str(self._ports["controller-metrics"]),
            "redis": f"127.0.0.1:{self._ports['redis']}",
            "repo-server": f"127.0.0.1:{self._ports['repo']}",
            "repo-server-plaintext": "true",
            # The health of each resource, with its message, in the Application's status.
            "persist-resource-health": "true",
        }
        program = str(self._program.parent / "argocd-application-controller")
        return self._process("argocd-application-controller", [program, *arguments(flags)])
