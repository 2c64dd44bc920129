"""One whole cluster for the tier: the chart, the images, an object store, MLflow, a corpus and a base model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo import place
from demo.install import NAMESPACE, Installation
from demo.terminal import Terminal
from e2e.hand import Hand, reaching
from e2e.jobs import Jobs, Run
from e2e.stories import Stage, Stories
from support.api import Api

CLUSTER = "e2e"
SECONDS_FOR_A_TEST = 2400
SECONDS_FOR_A_WAIT = 600
STEPS_OF_PRETRAINING = 30
ORDER = (
    "test_databricks_chain",
    "test_release",
    # NB: before the demo's second half, which moves the alias that the quickstart's model is loaded by.
    "test_quickstart",
    "test_demo",
    "test_promotion",
    "test_gitops",
    "test_lost_node",
    "test_network_policy",
    # What follows looks at the ends of stories: the longest of them begin first.
    "test_chain",
    "test_sweep",
    "test_spark_executors",
    "test_interrupted",
    "test_gpu_guide",
    "test_own_script",
    "test_bad_luck",
    # NB: the last, since it reads what the operator did for all others.
    "test_rights",
)
LAST = ("test_demo_leaves_nothing_in_a_cluster_that_stays", "test_cluster_leaves_nothing_on_this_machine")
KEEP = bool(os.environ.get("KEEP_CLUSTER"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test time for the cluster and its images; put those that take all of it away last."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(SECONDS_FOR_A_TEST))
    items.sort(key=rank)
    if KEEP:
        items[:] = [item for item in items if item.name not in LAST]


def rank(item: pytest.Item) -> tuple[bool, int]:
    """The place of a test in the order."""
    return item.name in LAST, ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Installation]:
    """The product, installed in a cluster; gone at the end, also after a failure, unless KEEP_CLUSTER is set."""
    terminal = Terminal()
    terminal.say()
    try:
        product = Installation(place.up(CLUSTER, terminal), terminal, max_seconds=SECONDS_FOR_A_WAIT)
        with terminal.stage("object store, chart, corpus and base model"):
            product.object_store()
            product.seed(STEPS_OF_PRETRAINING)
            product.chart("pollSeconds=2", "resyncSeconds=3", f"spark.namespaces={{{NAMESPACE}}}")
            product.wait_ready()
            product.finish_script("seed")
        yield product
    finally:
        if KEEP:
            terminal.say(
                f"\nthe cluster {CLUSTER} stays; `make cluster ARGS='down --name {CLUSTER}'` removes it"
            )
        else:
            place.down(CLUSTER)


@pytest.fixture(scope="session")
def stories(request: pytest.FixtureRequest, cluster: Installation) -> Iterator[Stories]:
    """The stories of all modules whose tests were selected: they begin as soon as the product is installed."""
    modules = dict.fromkeys(
        item.module for item in request.session.items if isinstance(item, pytest.Function)
    )
    jobs = Jobs(cluster, Api(cluster.place.kubectl.kubeconfig))
    selected_stories = Stories(Stage(jobs), [module for module in modules if hasattr(module, "run_story")])
    yield selected_stories
    selected_stories.cancel()


@pytest.fixture(scope="module")
def story(request: pytest.FixtureRequest, stories: Stories) -> Any:
    """What the module's story returned."""
    return stories.result(request.module)


@pytest.fixture(scope="session")
def installation(stories: Stories) -> Installation:
    """The product, installed."""
    return stories.stage.installation


@pytest.fixture(scope="session")
def jobs(stories: Stories) -> Jobs:
    """FineTuneJobs of the cluster."""
    return stories.stage.jobs


@pytest.fixture(scope="session")
def run(stories: Stories) -> Run:
    """The quickstart, run once for the tier: its tests look at it, and other jobs train on its splits."""
    return stories.stage.quickstart()


@pytest.fixture(scope="module")
def hand(installation: Installation) -> Iterator[Hand]:
    """A person's hand in MLflow and in the object store."""
    with reaching(installation) as person:
        yield person
