"""A release: what its parts are called, what is written down, and how the engines are called."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import images
from cluster.paths import REPOSITORY, ClusterError
from cluster.release import chart, engines, make
from cluster.release.target import Target

Json = dict[str, Any]
DIGEST = f"sha256:{'a' * 64}"
TARGETS = {
    "a registry": ("registry.example.com", Target("registry.example.com", "0.2.0")),
    "a folder of one": ("registry.example.com:5000/ml", Target("registry.example.com:5000/ml", "0.2.0")),
    "Docker Hub": ("docker.io/acme", Target("docker.io/acme", "0.2.0")),
    "this machine": ("localhost/ml", Target("localhost/ml", "0.2.0")),
    "a port": ("registry:5000", Target("registry:5000", "0.2.0")),
    "without TLS": ("http://127.0.0.1:5000", Target("127.0.0.1:5000", "0.2.0", tls=False)),
}


@pytest.mark.parametrize(("registry", "expected"), TARGETS.values(), ids=TARGETS)
def test_a_target(registry: str, expected: Target) -> None:
    assert Target.of(registry, "0.2.0") == expected


REFUSED = {
    "no registry": ("", "0.2.0", "REGISTRY= is no registry"),
    "a URL": (
        "https://registry.example.com",
        "0.2.0",
        "REGISTRY=https://registry.example.com is no registry",
    ),
    "a folder of Docker Hub": ("acme", "0.2.0", "REGISTRY=acme is no registry"),
    "two folders of Docker Hub": ("acme/ml", "0.2.0", "REGISTRY=acme/ml is no registry"),
    "no version": ("registry.example.com", "", "VERSION= is no version"),
    "a version of a tag": ("registry.example.com", "v0.2", "VERSION=v0.2 is no version"),
    "what no tag can hold": ("registry.example.com", "0.2.0+1", r"VERSION=0.2.0\+1 is no version"),
}


@pytest.mark.parametrize(("registry", "version", "message"), REFUSED.values(), ids=REFUSED)
def test_a_target_that_cannot_be(registry: str, version: str, message: str) -> None:
    with pytest.raises(ClusterError, match=f"^{message}"):
        Target.of(registry, version)


def test_image_and_chart_of_one_name_do_not_meet() -> None:
    target = Target("registry.example.com", "0.2.0")
    assert (target.image("finetune-operator"), target.image("finetune-trainer", "cu130"), target.charts) == (
        "registry.example.com/finetune-operator:0.2.0",
        "registry.example.com/finetune-trainer:0.2.0-cu130",
        "oci://registry.example.com/charts",
    )


def test_the_released_values_have_the_registry_and_differ_in_nothing_else() -> None:
    before = (chart.CHART / "values.yaml").read_text(encoding="utf-8")
    expected = yaml.safe_load(before)
    for name in chart.IMAGES:
        expected["image"][name]["registry"] = "registry.example.com/ml"
    assert yaml.safe_load(chart.with_registry(before, "registry.example.com/ml")) == expected


def test_values_without_a_place_for_the_registry_are_refused() -> None:
    values = (chart.CHART / "values.yaml").read_text(encoding="utf-8")
    with pytest.raises(ClusterError, match="of 0 images"):
        chart.with_registry(values.replace("    registry:", "    host:"), "registry.example.com")


def test_checksums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    files = [tmp_path / "install.yaml", tmp_path / "chart.tgz"]
    for file in files:
        file.write_text(file.name)
    (tmp_path / "checksums.txt").write_text(make.checksums(files))
    command = ["sha256sum", "--check", "--strict", "checksums.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "install.yaml: OK\nchart.tgz: OK\n")


class Recorder:
    """An engine that publishes nothing."""

    def __init__(self) -> None:
        self.published: list[tuple[str, str | None, tuple[str, ...]]] = []

    def publish(self, image: images.Image, reference: str, *, tls: bool) -> str:
        assert tls
        self.published.append((reference, image.target, image.arguments))
        return DIGEST


@pytest.mark.parametrize("reason", ["", "no wheel"], ids=["with wheels for CUDA", "without"])
def test_a_release(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images and its folder; the chart's own steps are those of the integration tests."""
    target, engine = Target("registry.example.com", "0.2.0"), Recorder()

    def packaged(_target: Target, folder: Path) -> Path:
        file = folder / "finetune-operator-0.2.0.tgz"
        file.write_text("the chart")
        return file

    monkeypatch.setattr(make, "FOLDER", tmp_path)
    monkeypatch.setattr(engines, "choose", lambda _base, _platform: engine)
    monkeypatch.setattr(make, "missing_wheels", lambda _cuda: reason)
    monkeypatch.setattr(chart, "package", packaged)
    monkeypatch.setattr(chart, "push", lambda _target, _package: DIGEST)
    monkeypatch.setattr(chart, "manifests", lambda _package: "kind: Namespace\n")
    folder = make.make(target, "python:3.11-slim", "cu130", "linux/amd64")

    cuda = ("registry.example.com/finetune-trainer:0.2.0-cu130", "trainer", ("TORCH_BACKEND=cu130",))
    assert engine.published == [
        ("registry.example.com/finetune-operator:0.2.0", None, ()),
        ("registry.example.com/finetune-prep:0.2.0", "prep", ()),
        ("registry.example.com/finetune-trainer:0.2.0", "trainer", ()),
        *([] if reason else [cuda]),
    ]
    assert (folder / "artifacts.txt").read_text().splitlines() == [
        f"registry.example.com/finetune-operator:0.2.0@{DIGEST}",
        f"registry.example.com/finetune-prep:0.2.0@{DIGEST}",
        f"registry.example.com/finetune-trainer:0.2.0@{DIGEST}",
        f"# {cuda[0]} is not built: no wheel" if reason else f"{cuda[0]}@{DIGEST}",
        f"oci://registry.example.com/charts/finetune-operator:0.2.0@{DIGEST}",
    ]
    assert [line.split()[1] for line in (folder / "checksums.txt").read_text().splitlines()] == [
        "finetune-operator-0.2.0.tgz",
        "install.yaml",
        "artifacts.txt",
    ]


# Records its arguments, and answers `docker inspect`.
DOCKER = """#!/bin/sh
echo "$*" >> {folder}/calls
[ "$1" = inspect ] && echo '["other.example.com/a@sha256:b", "{known}"]'
exit 0
"""
ARM = "linux/arm64"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], engines.Docker]:
    """A Docker engine that knows one image by its digest."""

    def answering(known: str) -> engines.Docker:
        program = tmp_path / "docker"
        program.write_text(DOCKER.format(folder=tmp_path, known=known))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return engines.Docker("python:3.11-slim", ARM)

    return answering


def test_docker_builds_and_pushes(docker: Callable[[str], engines.Docker], tmp_path: Path) -> None:
    engine = docker(f"registry.example.com/finetune-trainer@{DIGEST}")
    reference = "registry.example.com/finetune-trainer:0.2.0-cu130"
    image = engines.for_cuda("cu130")
    assert engine.publish(image, reference, tls=True) == DIGEST
    build, push, inspect = (tmp_path / "calls").read_text().splitlines()
    assert build == (
        f"build --platform {ARM} --file trainer_image/Dockerfile --tag {reference} --target trainer --build-arg "
        f"BASE_IMAGE=python:3.11-slim --build-arg TORCH_BACKEND=cu130 {REPOSITORY}"
    )
    assert (push, inspect) == (f"push {reference}", f"inspect --format {{{{json .RepoDigests}}}} {reference}")


# Docker leaves out the host of Docker Hub where it lists what it knows.
KNOWN = {
    "Docker Hub": ("docker.io/acme", "acme"),
    "Docker Hub in full": ("docker.io/acme", "docker.io/acme"),
    "a port": ("registry:5000/ml", "registry:5000/ml"),
}


@pytest.mark.parametrize(("registry", "known"), KNOWN.values(), ids=KNOWN)
def test_the_digest_of_what_docker_pushed(
    registry: str, known: str, docker: Callable[[str], engines.Docker]
) -> None:
    image = images.PROJECT[0]
    engine = docker(f"{known}/{image.name}@{DIGEST}")
    assert engine.publish(image, f"{registry}/{image.name}:0.2.0", tls=True) == DIGEST


def test_a_digest_that_docker_does_not_say(docker: Callable[[str], engines.Docker]) -> None:
    image = images.PROJECT[0]
    engine = docker(f"else.example.com/{image.name}@{DIGEST}")
    with pytest.raises(ClusterError, match=r"^docker does not say the digest of r.example.com/"):
        engine.publish(image, f"r.example.com/{image.name}:0.2.0", tls=True)


PLATFORMS = {
    "that of the machine": ("x86_64", "linux/amd64", True),
    "that of an Arm machine": ("aarch64", "linux/arm64", True),
    "another": ("aarch64", "linux/amd64", False),
}


@pytest.mark.parametrize(("machine", "platform", "built"), PLATFORMS.values(), ids=PLATFORMS)
def test_buildah_builds_for_the_machine_that_it_is_on(
    machine: str, platform: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("cluster.backends.can_be_local", lambda: True)
    monkeypatch.setattr("cluster.packages.ensure", lambda *_packages: None)
    if built:
        assert isinstance(engines.choose(engines.STAND_IN, platform), engines.Buildah)
    else:
        with pytest.raises(ClusterError, match=r"^buildah builds for linux/arm64 here"):
            engines.choose(engines.STAND_IN, platform)


def test_an_image_for_cuda_has_another_content(tmp_path: Path) -> None:
    trainer = next(image for image in images.PROJECT if image.target == "trainer")
    (tmp_path / "trainer_image").mkdir()
    (tmp_path / "trainer_image" / "Dockerfile").write_text("FROM scratch\n")
    hashes = {
        images.content_hash(tmp_path, image, None, "base") for image in (trainer, engines.for_cuda("cu130"))
    }
    assert len(hashes) == 2
