"""A node: a containerd and a kubelet with folders, addresses and control groups of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from cluster import binaries, cgroups, network, snapshots
from cluster.controlplane import arguments
from cluster.packages import cni_folder
from cluster.plan import DOMAIN
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.certificates import Authority
    from cluster.plan import Plan


class Node:
    """One node of a cluster. It may be stopped, crashed and started again."""

    def __init__(self, plan: Plan, number: int, directory: Path, authority: Authority, pause: str) -> None:
        self.plan = plan
        self.pause = pause
        self.name = plan.node_name(number)
        self.address = plan.node_address(number)
        self.cgroup = f"{plan.cgroup}/{self.name}"
        self.directory = directory / "nodes" / self.name
        # NB: a socket's path may have 107 letters; the supervisor's /run is its own.
        self.socket = f"/run/{self.name}.sock"
        self.images = self.directory / "containerd"
        self.directory.mkdir(parents=True, exist_ok=True)
        logs = directory / "logs"
        self.containerd = Process(
            f"containerd-{self.name}",
            ["containerd", "--config", str(self._containerd_configuration(directory))],
            logs / f"containerd-{self.name}.log",
        )
        self.kubelet = Process(
            f"kubelet-{self.name}",
            [str(binaries.path("kubelet")), *arguments(self._kubelet_flags(authority))],
            logs / f"kubelet-{self.name}.log",
        )

    @property
    def processes(self) -> list[Process]:
        """What runs the node, in the order it starts."""
        return [self.containerd, self.kubelet]

    def start(self) -> None:
        """Start the node; it is Ready some seconds later."""
        cgroups.create(self.cgroup)
        if not self.images.exists():
            snapshots.copy_to_node(self.images)
        self.containerd.start()
        wait_for(self.containerd.name, self._answers, 30, self.containerd)
        snapshots.add(snapshots.client(self.socket), [self.pause])
        self.kubelet.start()

    def stop(self) -> None:
        """Stop kubelet and containerd. Containers keep running, as during an upgrade of a node's daemons."""
        for process in reversed(self.processes):
            process.stop()

    def crash(self) -> None:
        """Lose the node: all its processes die at once, without a message to the API server."""
        for process in reversed(self.processes):
            process.kill()
        cgroups.kill(self.cgroup)

    def _answers(self) -> bool:
        return subprocess.run([sys.executable, "-m", "cluster.cri", self.socket], check=False).returncode == 0

    def _containerd_configuration(self, directory: Path) -> Path:
        networks = self.directory / "net.d"
        networks.mkdir(exist_ok=True)
        content = network.cni(self.plan, directory / "addresses")
        (networks / "10-pods.conflist").write_text(json.dumps(content, indent=1))
        file = self.directory / "containerd.toml"
        file.write_text(
            containerd_configuration(
                root=self.images,
                state=f"/run/{self.name}",
                socket=self.socket,
                pause=self.pause,
                plugins=str(cni_folder()),
                networks=networks,
            )
        )
        return file

    def _kubelet_flags(self, authority: Authority) -> dict[str, str]:
        pair = authority.issue(
            self.name, f"system:node:{self.name}", "system:nodes", [self.address, self.name]
        )
        file = self.directory / "kubelet.json"
        content = kubelet_configuration(
            address=self.address,
            dns=self.plan.gateway,
            socket=self.socket,
            cgroup=self.cgroup,
            directory=self.directory,
            authority=str(authority.own.certificate),
            certificate=str(pair.certificate),
            key=str(pair.key),
        )
        file.write_text(json.dumps(content, indent=1))
        (self.directory / "resolv.conf").write_text("")
        return {
            "config": str(file),
            "kubeconfig": str(authority.kubeconfig(self.directory / "kubeconfig", self.plan.server, pair)),
            "root-dir": str(self.directory / "kubelet"),
            "hostname-override": self.name,
            "node-ip": self.address,
        }


def rights() -> list[tuple[str, dict[str, Any]]]:
    """What nodes may read beyond what the node authorizer says of them: the path and content of each object.

    NB: that authorizer learns of a pod a moment after the kubelet does, and a refusal costs the pod a second.
    """
    group = "rbac.authorization.k8s.io"
    name = {"name": "nodes-read"}
    resources = ["pods", "configmaps", "secrets", "persistentvolumes", "persistentvolumeclaims"]
    rule = {"apiGroups": [""], "resources": resources, "verbs": ["get", "list", "watch"]}
    role = {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": name, "rules": [rule]}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": name,
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", **name},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": "system:nodes"}],
    }
    path = f"/apis/{group}/v1"
    return [(f"{path}/clusterroles/nodes-read", role), (f"{path}/clusterrolebindings/nodes-read", binding)]


def containerd_configuration(
    *, root: Path, state: str, socket: str, pause: str, plugins: str, networks: Path
) -> str:
    """The configuration file of containerd (version 2: understood by 1.6 and all that followed)."""
    return f"""\
version = 2
root = "{root}"
state = "{state}"
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
# Without CAP_SYS_RESOURCE no process may ask to be spared more than its parent, and no sandbox starts.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{networks}"
"""


def kubelet_configuration(
    *,
    address: str,
    dns: str,
    socket: str,
    cgroup: str,
    directory: Path,
    authority: str,
    certificate: str,
    key: str,
) -> dict[str, Any]:
    """The kubelet's configuration: small machines, both cgroup versions, and a lost node noticed in seconds."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "healthzBindAddress": address,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "clusterDomain": DOMAIN,
        "clusterDNS": [dns],
        "resolvConf": str(directory / "resolv.conf"),
        "authentication": {"x509": {"clientCAFile": authority}, "anonymous": {"enabled": False}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": certificate,
        "tlsPrivateKeyFile": key,
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "cgroupRoot": cgroup,
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "nodeLeaseDurationSeconds": 8,
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "10s",
        "volumePluginDir": str(directory / "plugins"),
        "podLogsDir": str(directory / "pods"),
    }
