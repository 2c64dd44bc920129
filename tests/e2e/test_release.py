"""A release to the local registry: every image and the chart are there, under the digests that are written down."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from cluster import backends, registry
from cluster.release import engines, make
from cluster.release.engines import STAND_IN
from cluster.release.target import Target

FOLDER = "release-test"
VERSION = "0.0.0-test"
# No wheel is for this one: the trainer's second image is told and left out.
NO_CUDA = "cu80"
MANIFESTS = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """A folder of the registry in the cache. Manifests go with the test; layers stay, since they take minutes to push."""
    repositories = registry.storage() / "docker/registry/v2/repositories" / FOLDER
    try:
        with registry.serving(tmp_path) as address:
            yield Target.of(f"http://{address}/{FOLDER}", VERSION)
    finally:
        for manifests in repositories.rglob("_manifests"):
            shutil.rmtree(manifests)
        shutil.rmtree(make.FOLDER / VERSION, ignore_errors=True)


def digest_of(artifact: str) -> str:
    """What the registry says of `[oci://]host/repository:tag@digest`."""
    host, _, path = artifact.removeprefix("oci://").partition("@")[0].partition("/")
    repository, _, tag = path.partition(":")
    url = f"http://{host}/v2/{repository}/manifests/{tag}"
    response = requests.head(url, headers={"Accept": MANIFESTS}, timeout=10)
    return response.headers.get("Docker-Content-Digest", f"{response.status_code}")


@pytest.mark.skipif(backends.choose()[0] != "local", reason="needs the registry of a local cluster")
def test_what_is_written_down_is_in_the_registry(target: Target) -> None:
    folder = make.make(target, STAND_IN, NO_CUDA, engines.here())
    *images, cuda, chart = (folder / "artifacts.txt").read_text(encoding="utf-8").splitlines()
    assert [line.rpartition("@")[0] for line in (*images, chart)] == [
        *(target.image(name) for name in ("finetune-operator", "finetune-prep", "finetune-trainer")),
        f"{target.charts}/finetune-operator:{VERSION}",
    ]
    assert [digest_of(line) for line in (*images, chart)] == [
        line.rpartition("@")[2] for line in (*images, chart)
    ]
    assert cuda.startswith(f"# {target.image('finetune-trainer', NO_CUDA)} is not built: ")
    check = ["sha256sum", "--check", "--strict", "checksums.txt"]
    done = subprocess.run(check, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
