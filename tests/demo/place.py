"""The cluster that the demo runs on, and the images it has there: all from the `cluster` package."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import backends, binaries
from cluster.paths import ClusterError
from demo.kubectl import DemoError, Kubectl
from support.waiting import WaitError

if TYPE_CHECKING:
    from demo.terminal import Terminal

TESTS = Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent


@dataclass(frozen=True)
class Place:
    """A cluster with the product's images in it."""

    name: str
    kubectl: Kubectl
    helm: Path
    operator_image: str
    prep_image: str
    trainer_image: str
    versitygw_image: str


def up(name: str, terminal: Terminal) -> Place:
    """Bring up a cluster and the images, or find them.

    Raises:
        DemoError: one of them is not available, for the reason that the cluster package printed.
    """
    with terminal.stage("prepare the programs and images of the cluster"):
        try:
            backends.BACKENDS[backends.choose()[0]].prepare()
        except (ClusterError, WaitError) as error:
            raise DemoError(str(error)) from error
    with terminal.stage("Kubernetes: a control plane and two nodes"):
        kubectl = Kubectl(binaries.path("kubectl"), Path(_cluster("up", name).split()[-1]))
    with terminal.stage("the images of the product"):
        images = dict(line.split("=", 1) for line in _cluster("images", name).splitlines() if "=" in line)
    return Place(
        name=name,
        kubectl=kubectl,
        helm=binaries.path("helm"),
        operator_image=images["IMAGE_OPERATOR"],
        prep_image=images["IMAGE_PREP"],
        trainer_image=images["IMAGE_TRAINER"],
        versitygw_image=images["IMAGE_VERSITYGW"],
    )


def is_ours() -> bool:
    """Whether the cluster goes when the demo goes, and everything in it."""
    return backends.choose()[0] != "current"


def find(name: str) -> Place:
    """The cluster alone, to take things away from it."""
    kubectl = Kubectl(binaries.path("kubectl"), Path(_cluster("kubeconfig", name).strip()))
    return Place(name, kubectl, binaries.path("helm"), *[""] * 4)


def down(name: str) -> None:
    """Take the cluster away."""
    _cluster("down", name)


def _cluster(verb: str, name: str) -> str:
    """Run the cluster package's command; its progress goes to the terminal, its result is returned."""
    done = subprocess.run(
        [sys.executable, "-m", "cluster", verb, "--name", name],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    if done.returncode != 0:
        raise DemoError(f"the cluster's `{verb}` failed: see above")
    return done.stdout
