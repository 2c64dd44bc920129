"""One whole cluster for the tier: the chart, the images, an object store, MLflow, a corpus and a base model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import place
from demo.install import NAMESPACE, Installation
from demo.kubectl import Json
from demo.terminal import Terminal
from e2e.hand import Hand, reaching
from e2e.jobs import STEPS, Jobs, Run, quickstart

CLUSTER = "e2e"
SECONDS_FOR_A_TEST = 2400
STEPS_OF_PRETRAINING = 30
LAST = ("test_demo_leaves_nothing_in_a_cluster_that_stays", "test_cluster_leaves_nothing_on_this_machine")
KEEP = bool(os.environ.get("KEEP_CLUSTER"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test time for the cluster and its images; put the test that takes all of it away last."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(SECONDS_FOR_A_TEST))
    items.sort(key=lambda item: item.name in LAST)
    if KEEP:
        items[:] = [item for item in items if item.name not in LAST]


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """The product, installed; gone at the end, also after a failure, unless KEEP_CLUSTER is set."""
    terminal = Terminal()
    terminal.say()
    try:
        found = Installation(place.up(CLUSTER, terminal), terminal)
        with terminal.stage("object store, chart, corpus and base model"):
            found.object_store()
            found.seed(STEPS_OF_PRETRAINING)
            found.chart("resyncSeconds=5", f"spark.namespaces={{{NAMESPACE}}}")
            found.wait_ready()
            found.finish_script("seed")
        yield found
    finally:
        if KEEP:
            terminal.say(
                f"\nthe cluster {CLUSTER} stays; `python -m cluster down --name {CLUSTER}` removes it"
            )
        else:
            place.down(CLUSTER)


@pytest.fixture(scope="session")
def run(installation: Installation) -> Run:
    """The quickstart, run once for the tier: its tests look at it, and other jobs train on its splits."""
    installation.delete("finetunejob", "quickstart")  # of a cluster that was kept
    jobs = Jobs(installation)
    statuses: list[Json] = []
    name = jobs.apply(quickstart(maxSteps=STEPS, evalEverySteps=30, logEverySteps=2))
    job = jobs.follow(name, seen=lambda job: statuses.append(job.get("status", {})))
    return Run(job, statuses)


@pytest.fixture(scope="module")
def hand(run: Run, installation: Installation) -> Iterator[Hand]:
    """A person's hand in MLflow and in the object store, once the quickstart has run."""
    with reaching(installation) as found:
        yield found


@pytest.fixture(scope="module")
def jobs(run: Run, installation: Installation) -> Iterator[Jobs]:
    """FineTuneJobs that are gone after the module; the quickstart's splits are there for them."""
    found = Jobs(installation)
    yield found
    found.remove()
