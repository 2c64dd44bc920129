"""The cluster that the demo runs on, and the images it has there: all from the `cluster` package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import backends, binaries, builder
from cluster.paths import ClusterError
from demo.kubectl import DemoError, Kubectl
from support.cache import cache
from support.waiting import WaitError

if TYPE_CHECKING:
    from demo.terminal import Terminal

TESTS = Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
GIB = 2**30
# What the first demo writes; and a later one, whose programs are in the cache, when the packages of the images changed.
GIB_THE_FIRST_TIME, GIB_FOR_A_RUN = 24, 12
# A kubelet that has less than one hundredth of the disk left puts a taint on its node, and pods stay Pending.
FREE_SHARE = 0.02


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
        DemoError: one of them is not available, for the reason that the cluster package printed; or the disk is too full.
    """
    if backends.choose()[0] == "local":
        disk = shutil.disk_usage(_existing(cache()))
        check_disk(disk.total, disk.free, first_time=not builder.folder().exists())
    with terminal.stage("Kubernetes: a control plane and two nodes"):
        try:
            backends.BACKENDS[backends.choose()[0]].prepare()
        except (ClusterError, WaitError) as error:
            raise DemoError(str(error)) from error
        # NB: nodes begin with the images that are unpacked by now; what they pull, they unpack again.
        kubectl = Kubectl(binaries.path("kubectl"), Path(_cluster("up", name).split()[-1]))
    with terminal.stage("images: operator, preparation, trainer"):
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


def check_disk(total: int, free: int, *, first_time: bool) -> None:
    """Refuse to start on a disk that a run would fill, in bytes.

    Raises:
        DemoError: there is too little room.
    """
    wanted = (GIB_THE_FIRST_TIME if first_time else GIB_FOR_A_RUN) * GIB + FREE_SHARE * total
    if free < wanted:
        raise DemoError(
            f"the disk of {cache()} has {free / GIB:.1f} GiB free, and a local cluster needs {wanted / GIB:.1f} GiB: on "
            "a full disk Kubernetes leaves pods Pending. Free some, set FINETUNE_CACHE to a folder on another disk, "
            "or remove the images of earlier runs with `PYTHONPATH=tests .venv/bin/python -m cluster prune`"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


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
