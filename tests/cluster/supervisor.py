"""The cluster's first process: starts everything inside its own namespaces, and keeps it running.

It is process 1 of a PID namespace, in a mount and a network namespace that nothing else holds. So when it ends,
for any reason, the kernel ends every process of the cluster and takes its mounts, interfaces and packet
filter rules away; there is nothing to clean up but a folder and the control groups.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cluster import audit, binaries, network, plan
from cluster.controlplane import ControlPlane, arguments
from cluster.node import Node
from cluster.node import rights as node_rights
from cluster.paths import ClusterError, State
from cluster.process import run
from cluster.volumes import Provisioner
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from types import FrameType

READY = "ready"
FAILED = "failed: "

# What the kubelet insists on, and would change for the whole machine.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


class Supervisor:
    """Everything of one cluster, from inside."""

    def __init__(self, state: State, settings: plan.Plan, pause: str) -> None:
        self.state = state
        self.plan = settings
        self.pause = pause
        self.nodes: dict[str, Node] = {}
        self.plane: ControlPlane | None = None
        self.provisioner: Provisioner | None = None
        self.kept: list[Process] = []

    def bring_up(self) -> None:
        """Start everything, in order, and return when nodes are Ready and names resolve."""
        prepare_mounts(self.state.directory)
        wait_for("the cable to this machine", network.connected, 30)
        network.configure(self.plan)
        self._tell("starting the control plane")
        self.plane = plane = self._control_plane()
        plane.start()
        self.kept += plane.processes
        self._tell("starting CoreDNS, kube-proxy, kube-network-policies and the nodes")
        self._start_services(plane)
        self.provisioner = Provisioner(plane.client, self.state.volumes)
        self.provisioner.install()
        for path, content in node_rights():
            plane.client.apply(path, content)
        for number in range(1, self.plan.nodes + 1):
            node = Node(self.plan, number, self.state.directory, plane.authority, self.pause)
            self.nodes[node.name] = node
            node.start()
            self.kept += node.processes
        wait_for("the nodes", self._nodes_ready, 90, *self.kept)
        wait_for("CoreDNS", _names_resolve, 30, *self.kept)
        shutil.copyfile(plane.kubeconfig, self.state.kubeconfig)
        self.state.kubeconfig.chmod(0o600)
        self._tell(READY)

    def keep(self) -> NoReturn:
        """Restart processes that ended, create volumes for claims, and execute requests in the control folder."""
        while True:
            self._reap()
            for process in self.kept:
                if not process.alive():
                    _log(f"{process.name} has ended, starting it again")
                    process.start()
            for request in sorted(self.state.control.iterdir()):
                self._obey(request)
            if self.provisioner is not None:
                self.provisioner.step()
            time.sleep(0.3)

    def _control_plane(self) -> ControlPlane:
        # NB: a node that says nothing is lost after 16 seconds and its pods go 10 later, not after minutes.
        patience = {
            "default-not-ready-toleration-seconds": "10",
            "default-unreachable-toleration-seconds": "10",
        }
        directory = self.state.directory / "controlplane"
        return ControlPlane(
            directory,
            address=self.plan.address,
            port=plan.API_PORT,
            services=self.plan.services,
            scheduler=True,
            apiserver_flags={**patience, **audit.build_flags(directory, self.state.audit_log)},
            controllers_flags={"node-monitor-grace-period": "16s", "node-monitor-period": "2s"},
        )

    def _start_services(self, plane: ControlPlane) -> None:
        authority, directory, logs = plane.authority, self.state.directory, self.state.logs
        viewer = authority.issue("services", "cluster-services", "system:masters")
        kubeconfig = authority.kubeconfig(directory / "services.kubeconfig", self.plan.server, viewer)
        corefile = directory / "Corefile"
        corefile.write_text(network.corefile(self.plan, kubeconfig))
        names = Process(
            "coredns", [str(binaries.path("coredns")), "-conf", str(corefile)], logs / "coredns.log"
        )
        proxy = Process(
            "kube-proxy",
            [str(binaries.path("kube-proxy")), *arguments(network.proxy_flags(self.plan, kubeconfig))],
            logs / "kube-proxy.log",
        )
        policies = Process(
            "networkpolicies",
            [
                str(binaries.path("networkpolicies")),
                *arguments({"kubeconfig": str(kubeconfig), "queue": str(network.POLICIES_QUEUE)}),
            ],
            logs / "networkpolicies.log",
        )
        for process in (names, proxy, policies):
            process.start()
            self.kept.append(process)

    def _nodes_ready(self) -> bool:
        assert self.plane is not None
        nodes = self.plane.client.get("/api/v1/nodes")
        ready = [
            node["metadata"]["name"]
            for node in (nodes or {"items": []})["items"]
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]
        return len(ready) == self.plan.nodes

    def _obey(self, request: Path) -> None:
        """A request is a file `<verb>.<process or node>`; it goes away when it is done."""
        verb, _, name = request.name.partition(".")
        node = self.nodes.get(name)
        processes = node.processes if node else [process for process in self.kept if process.name == name]
        _log(f"asked to {verb} {name}")
        if verb == "start" and node:
            node.start()
            self.kept += [process for process in processes if process not in self.kept]
        elif verb in {"stop", "crash"} and node:
            self.kept = [process for process in self.kept if process not in processes]
            node.crash() if verb == "crash" else node.stop()
        elif verb == "crash":
            for process in processes:
                process.kill()
        request.unlink(missing_ok=True)

    def _reap(self) -> None:
        """Take the exit status of orphans, which are all ours; leave that of our own processes to them."""
        processes = {process.started.pid: process for process in self.kept if process.started is not None}
        for node in self.nodes.values():
            processes |= {
                process.started.pid: process for process in node.processes if process.started is not None
            }
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in processes:
                processes[ended.si_pid].alive()
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _tell(self, line: str) -> None:
        _log(line)
        with self.state.progress.open("a") as progress:
            progress.write(line + "\n")


def prepare_mounts(directory: Path) -> None:
    """Give the cluster a /run and other folders of its own, in the mount namespace we are in."""
    run("mount", "--make-rshared", "/")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for target in SHADOWED:
        source = directory / "shadow" / target.name
        source.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(source), str(target))
    settings = Path("/run/kernel-settings")
    settings.mkdir()
    for name, value in KERNEL_SETTINGS.items():
        target = Path("/proc/sys") / name
        if target.exists():
            file = settings / name.replace("/", ".")
            file.write_text(value + "\n")
            run("mount", "--bind", str(file), str(target))


# Folders that programs of the nodes write to without a setting; `up` creates those that do not exist.
SHADOWED = (Path("/var/log"), Path("/var/lib/cni"), Path("/var/lib/kubelet"))


def main(name: str, pause: str) -> NoReturn:
    """Run the supervisor of the cluster `name` until it is signalled to end."""
    signal.signal(signal.SIGTERM, _end)
    state = State(name)
    settings = plan.load(state.settings)
    if settings is None:
        raise ClusterError(f"there are no settings for a cluster {name}")
    supervisor = Supervisor(state, settings, pause)
    try:
        supervisor.bring_up()
        supervisor.keep()
    except Exception as error:  # noqa: BLE001 - every error is reported to the waiting process
        traceback.print_exc()
        with state.progress.open("a") as progress:
            progress.write(f"{FAILED}{error}".replace("\n", " | ") + "\n")
        sys.exit(1)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # NB: nothing is to be unwound: with process 1 everything goes.
    os._exit(0)


def _names_resolve() -> bool:
    try:
        with urllib.request.urlopen("http://127.0.0.1:8181/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _log(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)
