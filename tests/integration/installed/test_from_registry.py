"""The chart of a release: pushed to a registry, and installed from there as people do."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import registry
from cluster.release import chart
from cluster.release.make import publish_chart
from cluster.release.target import Target
from finetune_crds.base import GROUP
from finetune_crds.resources import RESOURCES
from fixtures.operator_processes.servers import Plane
from integration.chart import helm
from integration.installed.installation import RELEASE, SYSTEM
from support.api import Api
from support.ports import free_port, listens
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
VERSION = "0.2.0-rc.1"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A registry of this module's own, and what is released to it."""
    folder = tmp_path_factory.mktemp("registry")
    port = free_port()
    server = registry.server(f"127.0.0.1:{port}", folder, folder / "log", folder / "images")
    with running(server):
        wait_for("the registry", lambda: listens(port), 20, server)
        yield Target.of(f"http://127.0.0.1:{port}/ml", VERSION)


@pytest.fixture(scope="module")
def published(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return publish_chart(target, tmp_path_factory.mktemp("release"))


def images_of(deployment: Json) -> list[str]:
    """The images that a Deployment of the operator names: its own, and those of jobs."""
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    values = {item["name"]: item.get("value") for item in container["env"]}
    return [container["image"], values["FINETUNE_PREP_IMAGE"], values["FINETUNE_TRAINER_IMAGE"]]


def test_the_chart_is_installed_from_the_registry(
    target: Target, published: tuple[Path, str], installation_plane: Plane
) -> None:
    address, _, digest = published[1].partition("@")
    assert address == f"oci://{target.registry}/charts/finetune-operator:{VERSION}"
    assert digest.startswith("sha256:")
    source = (f"{target.charts}/finetune-operator", "--version", VERSION, "--plain-http")
    where = ("--namespace", SYSTEM, "--kubeconfig", str(installation_plane.kubeconfig))
    values = ("--create-namespace", "--set", "tracking.uri=https://mlflow.example.com")
    installed = helm("install", RELEASE, *source, *where, *values)
    try:
        deployment = Api(installation_plane.kubeconfig).get("Deployment", SYSTEM, RELEASE)
    finally:
        uninstalled = helm("uninstall", RELEASE, *where)
    assert (installed.returncode, uninstalled.returncode) == (0, 0), installed.stderr + uninstalled.stderr
    # Every image has a registry, so there is nothing to warn of.
    assert "WARNING" not in installed.stdout
    assert deployment is not None
    assert images_of(deployment) == [
        target.image(name) for name in ("finetune-operator", "finetune-prep", "finetune-trainer")
    ]


def test_the_manifests_of_a_release_are_whole(
    target: Target, published: tuple[Path, str], installation_plane: Plane
) -> None:
    text = chart.manifests(published[0])
    kubectl = [str(installation_plane.kubectl), "--kubeconfig", str(installation_plane.kubeconfig)]
    # NB: a dry run creates no namespace for what follows.
    subprocess.run([*kubectl, "create", "namespace", SYSTEM], capture_output=True, check=False)
    apply = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
        "--filename",
        "-",
    ]
    done = subprocess.run([*kubectl, *apply], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    manifests = [part for part in yaml.safe_load_all(text) if part]
    assert manifests[0] == {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}
    crds = [part["metadata"]["name"] for part in manifests if part["kind"] == "CustomResourceDefinition"]
    assert sorted(crds) == sorted(f"{kind.PLURAL}.{GROUP}" for kind in RESOURCES)
    deployment = next(part for part in manifests if part["kind"] == "Deployment")
    assert images_of(deployment)[0] == target.image("finetune-operator")
    namespaces = {part["metadata"].get("namespace", SYSTEM) for part in manifests}
    assert namespaces == {SYSTEM}


def test_the_same_package_is_what_the_registry_has(
    target: Target, published: tuple[Path, str], tmp_path: Path
) -> None:
    source = (f"{target.charts}/finetune-operator", "--version", VERSION, "--plain-http")
    done = helm("pull", *source, "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    pulled = tmp_path / published[0].name
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (pulled, published[0])]
    assert digests[0] == digests[1]
