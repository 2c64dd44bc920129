"""The steps of a release: images, chart, and the folder `build/release/<version>`."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import images
from cluster.binaries import say
from cluster.paths import REPOSITORY, ClusterError
from cluster.release import chart, engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.release.engines import Engine
    from cluster.release.target import Target

FOLDER = REPOSITORY / "build" / "release"
_PYTHON_VERSION = "3.11"


def make(target: Target, base: str, cuda: str, platform: str) -> Path:
    """Build and push images and chart, and write what people install from; return its folder.

    The chart comes last: one that can be pulled has its images.

    Raises:
        ClusterError: a step failed.
    """
    engine = engines.choose(base, platform)
    folder = _new_folder(target)
    artifacts = [*_publish_images(engine, target), _publish_cuda(engine, target, cuda)]
    package, artifact = publish_chart(target, folder)
    files = [package, folder / "install.yaml", folder / "artifacts.txt"]
    files[1].write_text(chart.manifests(package), encoding="utf-8")
    files[2].write_text("".join(f"{line}\n" for line in [*artifacts, artifact]), encoding="utf-8")
    (folder / "checksums.txt").write_text(checksums(files), encoding="utf-8")
    return folder


def publish_chart(target: Target, folder: Path) -> tuple[Path, str]:
    """Package the chart into a folder and push it; return the file, and the line that says where it is."""
    package = chart.package(target, folder)
    say(f"pushing {target.charts}/{chart.NAME}")
    return package, f"{target.charts}/{chart.NAME}:{target.version}@{chart.push(target, package)}"


def checksums(files: Sequence[Path]) -> str:
    """What `sha256sum --check` reads, in the folder of the files."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def _new_folder(target: Target) -> Path:
    folder = FOLDER / target.version
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _publish_images(engine: Engine, target: Target) -> list[str]:
    """The references of the images, with their digests."""
    references = {target.image(image.name): image for image in images.PROJECT}
    return [
        f"{reference}@{engine.publish(image, reference, tls=target.tls)}"
        for reference, image in references.items()
    ]


def _publish_cuda(engine: Engine, target: Target, cuda: str) -> str:
    """The reference of the trainer for CUDA with its digest, or a line that says why there is none."""
    image = engines.for_cuda(cuda)
    reference = target.image(image.name, cuda)
    reason = missing_wheels(cuda)
    if reason:
        line = f"# {reference} is not built: {reason}"
        say(line.removeprefix("# "))
        return line
    return f"{reference}@{engine.publish(image, reference, tls=target.tls)}"


def missing_wheels(cuda: str) -> str:
    """Why torch for a version of CUDA cannot be had here; empty when it can. Nothing is downloaded but metadata.

    Raises:
        ClusterError: there is no such version.
    """
    version = _torch_version()
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "compile", "--quiet", "--no-deps", "--torch-backend", cuda]
    command += ["--python-version", _PYTHON_VERSION, "--python-platform", "linux", "-"]
    # NB: in the repository, uv would read pyproject.toml, which leaves torch out.
    done = subprocess.run(
        command, input=f"torch=={version}", cwd="/", capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode == 0:
        return ""
    refusal = " ".join(done.stderr.split())
    if "invalid value" in refusal:
        raise ClusterError(f"CUDA={cuda} is no build of torch that uv knows: name one such as cu130")
    return f"torch {version} for {cuda} cannot be had here: {refusal[:300]}"


def _torch_version() -> str:
    """The version of torch that the trainer's image has."""
    text = (REPOSITORY / "trainer_image" / "Dockerfile").read_text(encoding="utf-8")
    match = re.search(r"^ARG TORCH_VERSION=(\S+)$", text, re.MULTILINE)
    if match is None:
        raise ClusterError("trainer_image/Dockerfile names no TORCH_VERSION")
    return match[1]
