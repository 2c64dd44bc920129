"""The content of images, and the settings of this machine that their builds get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster import binaries, images, machine

DOCKERFILE = """\
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE} AS build
COPY crds/ /src/crds/
COPY --chown=1000:1000 operator/pyproject.toml \\
     operator/code /src/operator/
COPY --from=build /opt/venv /opt/venv
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,source=locks,target=/locks pip install /src/crds
COPY ["notes.txt", "/notes.txt"]
"""

IMAGE = images.Image("IMAGE_X", "x", "operator/Dockerfile")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in (
        "crds/a.py",
        "operator/code/b.py",
        "operator/pyproject.toml",
        "locks/l",
        "notes.txt",
        "README.md",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (tmp_path / "operator" / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def test_what_a_dockerfile_copies_is_found() -> None:
    wanted = ["crds/", "operator/pyproject.toml", "operator/code", "locks", "notes.txt"]
    assert images.copied(DOCKERFILE) == wanted


@pytest.mark.parametrize(
    "changed", ["crds/a.py", "operator/code/b.py", "operator/Dockerfile", "locks/l", "notes.txt"]
)
def test_the_hash_changes_with_each_input(context: Path, changed: str) -> None:
    before = images.content_hash(context, IMAGE, None, "base")
    with (context / changed).open("a") as file:
        file.write("\n# changed\n")
    assert images.content_hash(context, IMAGE, None, "base") != before


def test_the_hash_changes_with_the_base_the_target_and_the_wheels(context: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch.whl").write_bytes(b"1")
    other = images.Image("IMAGE_X", "x", "operator/Dockerfile", "prep")
    hashes = {
        images.content_hash(context, IMAGE, None, "base"),
        images.content_hash(context, IMAGE, None, "newer base"),
        images.content_hash(context, IMAGE, wheels, "base"),
        images.content_hash(context, other, None, "base"),
    }
    assert len(hashes) == 4


def test_the_hash_leaves_out_what_is_not_copied(context: Path) -> None:
    before = images.content_hash(context, IMAGE, None, "base")
    (context / "README.md").write_text("other words")
    (context / "crds" / "__pycache__").mkdir()
    (context / "crds" / "__pycache__" / "a.pyc").write_bytes(b"1")
    assert images.content_hash(context, IMAGE, None, "base") == before


def test_pip_is_told_what_this_machine_is_told(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.example/simple\ncert = /here/ca.crt\nfind-links = /here\n"
    )
    environment = {"PIP_EXTRA_INDEX_URL": "https://b.example/simple", "PIP_CERT": "/here/ca.crt"}
    assert machine.pip_configuration([file, tmp_path / "none"], environment).splitlines() == [
        "[global]",
        "index-url = https://a.example/simple",
        "extra-index-url = https://b.example/simple",
        f"cert = {machine.BUNDLE}",
    ]


def test_uv_takes_the_index_of_this_machine() -> None:
    assert "index-url" not in machine.uv_configuration({})
    assert 'index-url = "https://a.example/simple"' in machine.uv_configuration(
        {"PIP_INDEX_URL": "https://a.example/simple"}
    )


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
