"""The settings of a cluster: addresses, configurations, volumes, backend."""

from __future__ import annotations

import ipaddress
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster import backends, kind, network, node, plan, volumes
from cluster.certificates import alternative_name
from cluster.controlplane import arguments, first_address
from cluster.paths import ClusterError, State


def ranges(of: plan.Plan) -> list[ipaddress.IPv4Network]:
    link = ipaddress.IPv4Interface(f"{of.host_address}/30").network
    return [link, ipaddress.IPv4Network(of.pods), ipaddress.IPv4Network(of.services)]


def test_clusters_have_no_address_in_common() -> None:
    every = [each for index in range(plan.MOST_CLUSTERS) for each in ranges(plan.Plan("demo", index, 2))]
    merged = list(ipaddress.collapse_addresses(every))
    assert sum(each.num_addresses for each in merged) == sum(each.num_addresses for each in every)


def test_nodes_lie_below_the_first_pod_in_the_range_of_pods() -> None:
    largest = plan.Plan("demo", plan.MOST_CLUSTERS - 1, plan.MOST_NODES)
    last = ipaddress.IPv4Address(largest.node_address(largest.nodes))
    assert last in ipaddress.IPv4Network(largest.pods)
    assert ipaddress.IPv4Address(largest.gateway) < last < ipaddress.IPv4Address(largest.first_pod)


@pytest.mark.parametrize("name", ["", "Demo", "1st", "a-", "../x", "a" * 21])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="is no name for a cluster"):
        State(name)


def test_a_plan_is_kept_and_found_again(tmp_path: Path) -> None:
    wanted = plan.Plan("e2e", 3, 2)
    wanted.save(tmp_path / "cluster.json")
    assert plan.load(tmp_path / "cluster.json") == wanted
    assert plan.load(tmp_path / "none.json") is None


def test_containerd_has_its_own_folders_and_pause_image() -> None:
    text = node.containerd_configuration(
        root=Path("/state/root"),
        state="/run/demo-1",
        socket="/run/demo-1.sock",
        pause="registry.finetune.local/pause:1",
        plugins="/usr/lib/cni",
        networks=Path("/state/net.d"),
    )
    configuration = tomllib.loads(text)
    assert (configuration["root"], configuration["grpc"]["address"]) == ("/state/root", "/run/demo-1.sock")
    cri = configuration["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == "registry.finetune.local/pause:1"
    assert cri["restrict_oom_score_adj"] is True


def test_pods_find_names_where_the_kubelet_says() -> None:
    wanted = plan.Plan("demo", 1, 2)
    corefile = network.corefile(wanted, Path("/state/kubeconfig"))
    assert corefile.count(f"bind {wanted.gateway}") == 3
    assert f"{wanted.host_address} host.cluster.internal" in corefile
    bridge = network.cni(wanted, Path("/state/addresses"))["plugins"][0]
    assert bridge["ipam"]["ranges"] == [
        [{"subnet": "10.244.4.0/22", "rangeStart": "10.244.4.16", "gateway": wanted.gateway}]
    ]


def claim(**spec: Any) -> dict[str, Any]:
    requests = {"resources": {"requests": {"storage": "5Gi"}}, "accessModes": ["ReadWriteMany"]}
    return {
        "metadata": {"name": "data", "namespace": "team", "uid": "u1"},
        "spec": {**requests, "storageClassName": volumes.CLASS, **spec},
        "status": {"phase": "Pending"},
    }


def test_a_waiting_claim_gets_a_volume_of_its_own() -> None:
    volume = volumes.volume_for(claim(), Path("/volumes"))
    assert volume is not None
    assert volume["spec"]["hostPath"]["path"] == "/volumes/folder-u1"
    assert volume["spec"]["claimRef"]["uid"] == "u1"
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("spec", [{"volumeName": "mine"}, {"storageClassName": "other"}])
def test_other_claims_are_left_alone(spec: dict[str, Any]) -> None:
    assert volumes.volume_for(claim(**spec), Path("/volumes")) is None


def test_a_bound_claim_gets_nothing_more() -> None:
    bound = claim()
    bound["status"]["phase"] = "Bound"
    assert volumes.volume_for(bound, Path("/volumes")) is None


def test_the_backend_is_the_one_asked_for() -> None:
    assert backends.choose({"CLUSTER": "current"})[0] == "current"
    with pytest.raises(ClusterError, match="none of local, kind, current"):
        backends.choose({"CLUSTER": "minikube"})


@pytest.mark.parametrize(
    ("local", "docker", "kubeconfig", "chosen"),
    [(True, True, "/k", "local"), (False, True, "/k", "kind"), (False, False, "/k", "current")],
)
def test_the_first_backend_that_can_work_is_chosen(
    local: bool, docker: bool, kubeconfig: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "can_be_local", lambda: local)
    monkeypatch.setattr(kind, "has_docker", lambda: docker)
    assert backends.choose({"KUBECONFIG": kubeconfig})[0] == chosen


def test_without_any_backend_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "can_be_local", lambda: False)
    monkeypatch.setattr(kind, "has_docker", lambda: False)
    with pytest.raises(ClusterError, match="start a Docker engine and install kind"):
        backends.choose({})


def test_kind_shares_one_folder_between_all_nodes() -> None:
    nodes: Any = kind.configuration(State("demo"), 2)["nodes"]
    assert [each["role"] for each in nodes] == ["control-plane", "worker", "worker"]
    assert len({each["extraMounts"][0]["hostPath"] for each in nodes}) == 1
    items: Any = kind.persistent_volumes()["items"]
    assert [each["kind"] for each in items] == ["StorageClass"] + ["PersistentVolume"] * kind.VOLUMES


def test_flags_and_names() -> None:
    assert arguments({"a": "1", "b-c": "x"}) == ["--a=1", "--b-c=x"]
    assert first_address("10.248.4.0/22") == "10.248.4.1"
    assert alternative_name("10.0.0.1") == "IP:10.0.0.1"
    assert alternative_name("kubernetes.default") == "DNS:kubernetes.default"
