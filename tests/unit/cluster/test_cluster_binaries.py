"""The programs of clusters: what each is kept by, and which version of Kubernetes they are of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster import binaries
from cluster.crds import KUEUE_WORKLOADS
from cluster.paths import ClusterError


def test_a_program_is_kept_by_what_it_is_built_from() -> None:
    digests = {program.digest() for program in binaries.PROGRAMS.values()}
    assert len(digests) == len(binaries.PROGRAMS)
    kube = binaries.PROGRAMS["kube"]
    assert "etcd" in kube.links
    assert kube.path.parent.name == f"kube-{kube.digest()}"


def test_go_modules_agree_on_the_version() -> None:
    module = (binaries.MODULE / "go.mod").read_text()
    assert f"k8s.io/kubernetes {binaries.KUBERNETES}" in module
    assert f"\ngo {binaries.GO[0]}.{binaries.GO[1]}.0\n" in module
    argocd = (binaries.ARGOCD_MODULE / "go.mod").read_text()
    version = binaries.PROGRAMS["argocd"].title.removeprefix("Argo CD ")
    assert f"require {binaries.ARGOCD} v{version}." in argocd
    jobset = (binaries.JOBSET_MODULE / "go.mod").read_text()
    version = binaries.PROGRAMS["jobset"].title.removeprefix("JobSet ")
    assert f"{binaries.JOBSET} v{version}." in jobset
    policies = (binaries.NETWORK_POLICIES_MODULE / "go.mod").read_text()
    version = binaries.PROGRAMS["networkpolicies"].title.removeprefix("kube-network-policies ")
    assert f"sigs.k8s.io/kube-network-policies v{version}." in policies
    kueue = (binaries.KUEUE_MODULE / "go.mod").read_text()
    version = binaries.PROGRAMS["kueue"].title.removeprefix("Kueue ")
    assert f"{binaries.KUEUE} v{version}." in kueue
    assert f"{KUEUE_WORKLOADS.module} {KUEUE_WORKLOADS.version}\n" in kueue


def test_a_peer_that_is_measured_is_compiled_with_inlining() -> None:
    assert "-gcflags=all=-dwarf=false -l" in binaries.flags(binaries.MODULE)
    assert not [flag for flag in binaries.flags(binaries.JOBSET_MODULE) if flag.startswith("-gcflags")]


@pytest.mark.parametrize(
    ("module", "version"),
    [(binaries.MODULE, binaries.KUBERNETES), (binaries.OLDEST_MODULE, binaries.OLDEST)],
    ids=["newest", "oldest"],
)
def test_all_parts_of_kubernetes_have_one_version(module: Path, version: str) -> None:
    text = (module / "go.mod").read_text()
    assert f"\tk8s.io/kubernetes {version}\n" in text
    parts = re.findall(r"^\t(k8s\.io/[a-z-]+) => \1 (\S+)$", text, re.MULTILINE)
    assert len(parts) > 25
    assert {each for _, each in parts} == {version.replace("v1.", "v0.")}


@pytest.mark.parametrize(
    ("asked", "program", "owner"),
    [
        ("", "kubectl", "kubectl"),
        ("", "coredns", "kube"),
        ("1.31", "kubectl", "kube-oldest"),
        ("1.31", "etcd", "kube-oldest"),
        ("1.31", "helm", "helm"),
    ],
)
def test_the_environment_selects_the_oldest_kubernetes(
    asked: str, program: str, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("FINETUNE_KUBERNETES", asked)
    path = binaries.PROGRAMS[owner].path
    path.parent.mkdir(parents=True)
    path.touch()
    assert binaries.path(program) == path.parent / program


@pytest.mark.parametrize(
    ("asked", "program", "sentence"),
    [
        ("1.32", "kubectl", "FINETUNE_KUBERNETES=1.32 is unknown: set it to 1.31, or unset it for v1."),
        ("1.31", "kubelet", "Kubernetes 1.31 is built without kubelet: unset FINETUNE_KUBERNETES"),
    ],
)
def test_no_other_version_runs_in_place_of_the_one_that_is_asked_for(
    asked: str, program: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_KUBERNETES", asked)
    with pytest.raises(ClusterError, match=f"^{re.escape(sentence)}"):
        binaries.path(program)


def test_programs_that_are_not_used_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    current = binaries.PROGRAMS["helm"].folder
    for folder in (current, current.with_name("helm-0123456789abcdef"), current.with_name("building-x")):
        folder.mkdir(parents=True)
    binaries.remove_unused()
    assert [path for path in current.parent.iterdir() if path.is_dir()] == [current]


def test_a_name_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert binaries.main(["kubeadm"]) == 1
    assert capsys.readouterr().err.startswith("error: unknown programs: kubeadm; known are kube, kubectl, ")
