"""The pods of a job accept connections only from each other.

The cluster is one of its own, in which kube-network-policies enforces NetworkPolicies. The operator runs on this machine.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster import backends, binaries, images, network, plan
from cluster.paths import State
from e2e.own_cluster import NAMESPACE, build_job, own_cluster
from support.api import Api
from support.operator_process import operator_process, watching
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
CLUSTER, OTHER_NAMESPACE, NAME = "policies", "other", "tune"
PORT = 29500
_UID_LABEL = "finetune.dev/job-uid"
# The exit code tells whether a connection was accepted: packets that a policy forbids are dropped.
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


class Pod(NamedTuple):
    """A pod that exists."""

    namespace: str
    name: str


@pytest.fixture
def api() -> Iterator[Api]:
    """A cluster of two nodes with our CRDs."""
    with own_cluster(CLUSTER) as server:
        yield server


def create_pod(api: Api, pod: Pod, labels: Json) -> Pod:
    """Create a pod that does nothing, and wait until it runs."""
    command = ["python3", "-c", "import time; time.sleep(600)"]
    container = {"name": "main", "image": images.base_reference(), "command": command}
    api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
    )

    def is_running() -> bool:
        body = api.get("Pod", pod.namespace, pod.name)
        return body is not None and body["status"]["phase"] == "Running"

    wait_for(f"{pod.name} runs", is_running, 60)
    return pod


def connects(api: Api, pod: Pod, address: str, port: int = PORT) -> bool:
    """Whether a pod can connect to a port at an address."""
    kubectl = [str(binaries.path("kubectl")), "--kubeconfig", str(api.kubeconfig)]
    run = [*kubectl, "--namespace", pod.namespace, "exec", pod.name, "--"]
    done = subprocess.run(
        [*run, "python3", "-c", _CONNECT, address, str(port)], capture_output=True, check=False, timeout=60
    )
    return done.returncode == 0


def count_starts() -> int:
    """How often the program that judges connections has started: it starts anew when it has ended, and allows all of them meanwhile."""
    log = State(CLUSTER).logs / "networkpolicies.log"
    return log.read_text(encoding="utf-8").count("Starting controller")


@pytest.mark.skipif(
    backends.choose()[0] != "local" or not network.can_enforce_policies(),
    reason="needs a local cluster on a kernel with br_netfilter, since other clusters may enforce no NetworkPolicies",
)
def test_only_pods_of_a_job_connect_to_its_pods(api: Api, tmp_path: Path) -> None:
    settings = watching(NAMESPACE, "", resync_seconds=1)
    with running(operator_process(api.kubeconfig, tmp_path / "operator.log", settings)):
        # The pods listen at the port of the rendezvous.
        job = build_job(NAME, ["python3", "-m", "http.server", str(PORT)])
        uid = api.create(job)["metadata"]["uid"]
        # Anybody may write the label, but the policy is about pods of the namespace alone.
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER_NAMESPACE}})
        stranger = create_pod(api, Pod(NAMESPACE, "stranger"), {"finetune.dev/job": NAME})
        impostor = create_pod(api, Pod(OTHER_NAMESPACE, "impostor"), {_UID_LABEL: uid})

        def find_addresses() -> dict[str, str] | None:
            pods = api.list("Pod", NAMESPACE, f"{_UID_LABEL}={uid}")
            addresses = {pod["metadata"]["name"]: pod["status"].get("podIP", "") for pod in pods}
            return addresses if len(addresses) == 2 and all(addresses.values()) else None

        addresses = wait_for("two pods have addresses", find_addresses, 120)
        first, second = (Pod(NAMESPACE, name) for name in sorted(addresses))
        # By the name that torchrun uses.
        rendezvous = f"{NAME}-train-1-0.{NAME}"
        wait_for("the second pod reaches the first", lambda: connects(api, second, rendezvous), 60)
        connected = {
            "first": connects(api, second, addresses[first.name]),
            "second": connects(api, first, addresses[second.name]),
            "stranger": connects(api, stranger, addresses[first.name]),
            "impostor": connects(api, impostor, addresses[first.name]),
        }
        assert connected == {"first": True, "second": True, "stranger": False, "impostor": False}

        # Packets from and to an address of no pod are judged, too.
        with socket.create_server(("", 0)) as server:
            assert connects(api, stranger, plan.HOST_NAME, server.getsockname()[1])
        assert count_starts() == 1

        # The policy made the difference, and nothing else did.
        with_policy = api.get("NetworkPolicy", NAMESPACE, NAME)
        assert with_policy is not None
        opened = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "mine", "namespace": NAMESPACE},
            "spec": {**with_policy["spec"], "ingress": [{"ports": [{"port": PORT}]}]},
        }
        api.create(opened)
        wait_for(
            "a policy of ones own opens the port", lambda: connects(api, stranger, addresses[first.name]), 60
        )
