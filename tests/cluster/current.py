"""A cluster that is there already: the one KUBECONFIG says. Nothing is brought up, nothing taken down."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import images
from cluster.binaries import say
from cluster.paths import ClusterError


def up(name: str, nodes: int = 2) -> Path:
    """The kubeconfig in use."""
    file = Path(os.environ.get("KUBECONFIG", "").split(os.pathsep)[0] or Path.home() / ".kube" / "config")
    if not file.is_file():
        raise ClusterError("CLUSTER=current needs a cluster to use: set KUBECONFIG to its kubeconfig")
    say(f"using the cluster of {file}; {name} and {nodes} nodes are not asked of it")
    return file


def down(name: str) -> None:
    """Leave it as it is."""
    say(f"the cluster is not ours to take down: {name} stays")


def status(name: str) -> dict[str, object]:
    """Where it is."""
    return {"name": name, "kubeconfig": str(up(name)), "backend": "current"}


def prepare() -> None:
    """Does nothing: the images are somebody else's."""


def build_images(name: str, project_images: list[images.Image]) -> dict[str, str]:
    """The images to use, which the cluster must be able to pull."""
    variables = [*(image.variable for image in project_images), images.OBJECT_STORE]
    missing = [variable for variable in variables if not os.environ.get(variable)]
    if missing:
        raise ClusterError(
            f"cluster {name} is not ours to load images into: push them to a registry it pulls from and set "
            + ", ".join(missing)
        )
    return {variable: os.environ[variable] for variable in variables}
