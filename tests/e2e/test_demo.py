"""The demo's second half, and how the demo is taken away, on this tier's cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import plan
from cluster.paths import State
from cluster.process import run as call
from demo import place, promotions
from demo.install import CRDS, NAMESPACE, RELEASE, SYSTEM, Installation
from e2e.hand import Hand
from e2e.jobs import Run

MODEL = "docstring-llama"
LOSS_OF_A_BAD_VERSION = 9.0


@pytest.fixture
def worse(run: Run, installation: Installation, hand: Hand) -> Iterator[str]:
    """A bad version of the quickstart's model, where the demo trains one; candidate is put back afterwards."""
    promotions.forget(installation)  # of a cluster that was kept
    (version,) = hand.register(MODEL, run.status["mlflow"]["runId"], LOSS_OF_A_BAD_VERSION)
    yield version
    hand.move_alias(MODEL, "candidate", run.status["model"]["version"])


def test_promotions_tell_the_demos_story(
    run: Run, installation: Installation, hand: Hand, worse: str
) -> None:
    good = run.status["model"]["version"]
    promotions.promote(installation, good)
    names = ("candidate", *promotions.NAMES)
    aliases = hand.aliases(MODEL)
    assert {name: aliases.get(name) for name in names} == dict.fromkeys(names, good)
    tags = hand.mlflow.get_model_version(MODEL, good).tags
    assert (tags["promoted_champion_by"], tags["service"]) == ("you", "docstrings")

    hand.move_alias(MODEL, "candidate", worse)
    promotions.refuse(installation, good, worse)
    promotions.overrule(installation, worse)
    promotions.roll_back(installation, good)
    aliases = hand.aliases(MODEL)
    assert {name: aliases.get(name) for name in names} == {
        "candidate": worse,
        "staging": good,
        "champion": good,
    }

    text = "\n".join(promotions.summary(installation))
    header, *rows = text.partition("The promotions\n")[2].splitlines()[:3]
    columns = ["NAME", "MODEL", "ALIAS", "PHASE", "REASON", "CURRENT"]
    assert header.split()[:6] == columns
    cells = [dict(zip(columns, row.split(), strict=False)) for row in rows]
    assert [[row[name] for name in columns] for row in cells] == [
        ["staging", MODEL, "staging", "Refused", "GateFailed", good],
        ["champion", MODEL, "champion", "Promoted", "RolledBack", good],
    ]
    history = text.partition("newest first\n")[2].splitlines()
    assert [line.split()[1:5] for line in history] == [
        [worse, "->", good, "RolledBack"],
        [good, "->", worse, "Promoted"],
        ["none", "->", good, "Promoted"],
    ]
    promotions.forget(installation)
    assert hand.aliases(MODEL) == {"candidate": worse}


def test_demo_leaves_nothing_in_a_cluster_that_stays(installation: Installation) -> None:
    installation.remove()
    kubectl = installation.place.kubectl
    object_names = [
        item["metadata"]["name"]
        for kind in ("namespaces", "crds", "clusterroles", "clusterrolebindings", "persistentvolumes")
        for item in kubectl.items(kind)
    ]
    ours = (NAMESPACE, SYSTEM, *CRDS)
    assert [name for name in object_names if name in ours or RELEASE in name] == []


def test_cluster_leaves_nothing_on_this_machine(installation: Installation) -> None:
    name = installation.place.name
    state = State(name)
    settings = plan.load(state.settings)
    if settings is None:
        pytest.skip("the cluster is no local one")
    place.down(name)
    assert not state.directory.exists()
    links = [line for line in call("ip", "-brief", "link").splitlines() if settings.host_link in line]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(state.directory) in line]
    cgroups = [*Path("/sys/fs/cgroup").glob(f"*{settings.cgroup}"), Path(f"/sys/fs/cgroup{settings.cgroup}")]
    assert (links, mounts, [folder for folder in cgroups if folder.exists()], programs_of(state)) == (
        [],
        [],
        [],
        [],
    )


def programs_of(state: State) -> list[str]:
    """The command lines of programs that were given the cluster's folder, and are not this process's own."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(state.directory) in command and parent != os.getpid():
            commands.append(command)
    return commands
