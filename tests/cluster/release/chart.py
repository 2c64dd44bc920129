"""The chart of a release: its package with the registry in its values, and the manifests that it renders to."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import binaries
from cluster.paths import REPOSITORY, ClusterError

if TYPE_CHECKING:
    from cluster.release.target import Target

NAME = "finetune-operator"
NAMESPACE = "finetune-system"
CHART = REPOSITORY / "charts" / NAME
IMAGES = ("operator", "prep", "trainer")
_NAMESPACE_MANIFEST = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"


def package(target: Target, folder: Path) -> Path:
    """Package the chart into a folder; return the file."""
    with tempfile.TemporaryDirectory(prefix="chart-") as directory:
        chart = shutil.copytree(CHART, Path(directory) / NAME)
        values = chart / "values.yaml"
        values.write_text(
            with_registry(values.read_text(encoding="utf-8"), target.registry), encoding="utf-8"
        )
        version = ("--version", target.version, "--app-version", target.version)
        _helm("package", str(chart), *version, "--destination", str(folder))
    return folder / f"{NAME}-{target.version}.tgz"


def with_registry(values: str, registry: str) -> str:
    """The text of the chart's values where the product's images are in a registry.

    Raises:
        ClusterError: the text does not have what is to be replaced.
    """
    before, marker, after_marker = values.partition("\nimage:\n")
    images, end, after = re.split(r"(\n(?=\S))", after_marker, maxsplit=1)
    replaced, count = re.subn(r'^(    registry:) ""$', rf"\1 {registry}", images, flags=re.MULTILINE)
    if not marker or count != len(IMAGES):
        raise ClusterError(
            f"values.yaml names the registry of {count} images under image, not of {len(IMAGES)}"
        )
    return f"{before}{marker}{replaced}{end}{after}"


def push(target: Target, package: Path) -> str:
    """Push a packaged chart; return its digest."""
    insecure = () if target.tls else ("--plain-http",)
    output = _helm("push", str(package), target.charts, *insecure)
    match = re.search(r"Digest: (sha256:[0-9a-f]{64})", output)
    if match is None:
        raise ClusterError(f"helm push does not say the digest of the chart:\n{output.strip()}")
    return match[1]


def manifests(package: Path) -> str:
    """The manifests of a packaged chart as it comes, with its namespace, for `kubectl apply --server-side`."""
    # NB: without the option, helm renders for the version of Kubernetes that it was built with.
    version = ("--kube-version", binaries.KUBERNETES)
    rendered = _helm("template", NAME, str(package), "--namespace", NAMESPACE, *version)
    return f"{_NAMESPACE_MANIFEST}{rendered}"


def _helm(*arguments: str) -> str:
    """Run helm to its end; return all that it printed."""
    command = [str(binaries.path("helm")), *arguments]
    # NB: helm prints the digest of what it pushed as an error.
    output = subprocess.STDOUT if arguments[0] == "push" else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise ClusterError(f"helm {arguments[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
