"""The content of images, and the settings of this machine that their builds get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster import images, machine
from cluster.paths import REPOSITORY

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


def test_images_and_environment_have_one_version_of_uv() -> None:
    files = ("Makefile", "operator/Dockerfile", "trainer_image/Dockerfile")
    pattern = r"(?:UV_VERSION := |ARG UV=uv==)(\S+)"
    versions = {file: re.findall(pattern, (REPOSITORY / file).read_text()) for file in files}
    assert versions == dict.fromkeys(files, versions["Makefile"])
