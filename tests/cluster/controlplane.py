"""etcd, kube-apiserver and kube-controller-manager (and optionally a scheduler), without root and containers.

    with running(ControlPlane(tmp_path)) as plane:
        subprocess.run([plane.kubectl, "--kubeconfig", plane.kubeconfig, "get", "namespaces"])

Nothing runs pods here: Jobs get their pods, which stay Pending unless a test says otherwise through their status.
"""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING

from cluster import binaries
from cluster.certificates import Authority
from cluster.client import Client
from support.ports import free_port, listens
from support.process import Process
from support.waiting import PATIENCE, wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SERVICES = "10.248.0.0/16"


class ControlPlane:
    """A control plane in one folder.

    It runs within `running()`, and ends with it, also when the body fails or the process is killed.
    `etcd`, `apiserver` and `controllers` are processes a test may `kill()`, `stop()` and `start()` again;
    `wait_ready()` says when the API answers.

    Args:
        directory: holds everything: data, certificates, logs, the kubeconfig.
        address: the address of the API server, and of nothing else if it is on the loopback.
        port: of the API server; a free one unless given.
        etcd_port: of etcd, always on the loopback; a free one unless given.
        hosts: more names and addresses that the API server's certificate is for.
        services: the range of Service addresses.
        scheduler: also run kube-scheduler.
        controllers: also run kube-controller-manager.
        apiserver_flags, controllers_flags: flags to add; the last of a name counts.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        etcd_port: int | None = None,
        hosts: Sequence[str] = (),
        services: str = SERVICES,
        scheduler: bool = False,
        controllers: bool = True,
        apiserver_flags: Mapping[str, str] | None = None,
        controllers_flags: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.address = address
        self.port = port or free_port()
        self.etcd_port = etcd_port or free_port()
        self.kubectl = binaries.path("kubectl")
        directory.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(directory / "pki")
        self.server = f"https://{address}:{self.port}"
        self._services = services
        admin = self.authority.issue("admin", "kubernetes-admin", "system:masters")
        self.kubeconfig = self.authority.kubeconfig(directory / "kubeconfig", self.server, admin)
        self.client = Client(self.server, self.authority.own.certificate, admin)
        self.etcd = self._etcd()
        self.apiserver = self._apiserver(hosts, apiserver_flags or {})
        self.controllers = self._controllers(controllers_flags or {})
        self.scheduler = self._scheduler() if scheduler else None
        self._wanted = [self.etcd, self.apiserver]
        self._wanted += [self.controllers] if controllers else []
        self._wanted += [self.scheduler] if self.scheduler else []

    @property
    def processes(self) -> list[Process]:
        """The configured processes, in the order in which they start."""
        return list(self._wanted)

    def start(self, timeout: float = PATIENCE) -> None:
        """Start the configured processes and wait until they are ready."""
        try:
            self.etcd.start()
            # NB: an API server that finds no etcd waits seconds before it tries again.
            wait_for("etcd", lambda: listens(self.etcd_port), timeout, self.etcd)
            self.apiserver.start()
            self.wait_ready(timeout)
            for process in self._wanted[2:]:
                process.start()
            if self.controllers in self._wanted:
                # NB: no pod can be created in a namespace before its default service account is there.
                wait_for("controllers", self._has_account, timeout, self.apiserver, self.controllers)
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, timeout: float = PATIENCE) -> None:
        """Wait until the API server answers and has created its own objects (roles, namespaces)."""
        wait_for("the API server", self.client.ready, timeout, self.etcd, self.apiserver)

    def stop(self) -> None:
        """End everything; what it wrote stays."""
        running = [process for process in reversed(self._wanted) if process.started is not None]
        for process in running:
            if process.alive() and process.started is not None:
                process.started.terminate()
        deadline = time.monotonic() + 2
        while any(process.alive() for process in running) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in running:
            process.kill()

    def _has_account(self) -> bool:
        return self.client.get("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def _process(self, name: str, flags: Mapping[str, str]) -> Process:
        program = str(binaries.path(name))
        log = self.directory / "logs" / f"{name}.log"
        return Process(name, [program, *arguments(flags)], log)

    def _etcd(self) -> Process:
        url = f"http://127.0.0.1:{self.etcd_port}"
        # NB: nothing connects to the peer address of a single etcd, but etcd requires a port for it.
        peer = f"http://127.0.0.1:{free_port()}"
        flags = {
            "data-dir": str(self.directory / "etcd"),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",
            "auto-compaction-retention": "5m",
            "quota-backend-bytes": str(4 * 1024**3),
            "log-level": "warn",
        }
        return self._process("etcd", flags)

    def _apiserver(self, hosts: Sequence[str], more: Mapping[str, str]) -> Process:
        loopback = self.address.startswith("127.")
        names = ["localhost", "127.0.0.1", self.address, first_address(self._services), *hosts]
        names += ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names += ["kubernetes.default.svc.cluster.local"]
        server = self.authority.issue("apiserver", "kube-apiserver", hosts=list(dict.fromkeys(names)))
        kubelet = self.authority.issue("apiserver-kubelet", "kube-apiserver-kubelet", "system:masters")
        proxy = self.authority.issue("front-proxy", "front-proxy")
        key = str(self.authority.signing_key("service-accounts"))
        flags = {
            "etcd-servers": f"http://127.0.0.1:{self.etcd_port}",
            "bind-address": "127.0.0.1" if loopback else "0.0.0.0",
            "advertise-address": self.address,
            "secure-port": str(self.port),
            # NB: an endpoint on the loopback is not valid, so it cannot be written.
            "endpoint-reconciler-type": "none" if loopback else "lease",
            "service-cluster-ip-range": self._services,
            "cert-dir": str(self.directory / "pki"),
            "tls-cert-file": str(server.certificate),
            "tls-private-key-file": str(server.key),
            "client-ca-file": str(self.authority.own.certificate),
            "kubelet-client-certificate": str(kubelet.certificate),
            "kubelet-client-key": str(kubelet.key),
            "kubelet-certificate-authority": str(self.authority.own.certificate),
            "kubelet-preferred-address-types": "InternalIP",
            "requestheader-client-ca-file": str(self.authority.own.certificate),
            "requestheader-allowed-names": "front-proxy",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-username-headers": "X-Remote-User",
            "proxy-client-cert-file": str(proxy.certificate),
            "proxy-client-key-file": str(proxy.key),
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "profiling": "false",
            **more,
        }
        return self._process("kube-apiserver", flags)

    def _controllers(self, more: Mapping[str, str]) -> Process:
        flags = {
            **self._as_user("controller-manager", "system:kube-controller-manager"),
            "service-account-private-key-file": str(self.authority.signing_key("service-accounts")),
            "root-ca-file": str(self.authority.own.certificate),
            "controllers": "*",
            # NB: with the client's usual 20 requests a second the controllers, not the operator, set the pace.
            "kube-api-qps": "1000",
            "kube-api-burst": "2000",
            "concurrent-job-syncs": "20",
            **more,
        }
        return self._process("kube-controller-manager", flags)

    def _scheduler(self) -> Process:
        flags = {
            **self._as_user("scheduler", "system:kube-scheduler"),
            "kube-api-qps": "1000",
            "kube-api-burst": "2000",
        }
        return self._process("kube-scheduler", flags)

    def _as_user(self, name: str, user: str) -> dict[str, str]:
        # NB: without an account for each controller, one that may do everything is needed.
        pair = self.authority.issue(name, user, "system:masters")
        file = self.authority.kubeconfig(self.directory / "pki" / f"{name}.kubeconfig", self.server, pair)
        return {
            "kubeconfig": str(file),
            "authentication-kubeconfig": str(file),
            "authorization-kubeconfig": str(file),
            "bind-address": "127.0.0.1",
            "secure-port": str(free_port()),
            "leader-elect": "false",
            "profiling": "false",
        }


def arguments(flags: Mapping[str, str]) -> list[str]:
    """Flags as a command line spells them."""
    return [f"--{name}={value}" for name, value in flags.items()]


def first_address(network: str) -> str:
    """The first address of a range: that of the Service `kubernetes` among Services."""
    return str(next(iter(ipaddress.ip_network(network).hosts())))
