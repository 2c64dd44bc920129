"""The operator behind an API server that refuses requests and ends watches, and an MLflow server that answers slowly."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kopf import OperatorSettings

from finetune_operator.controller import watches
from fixtures.operator_processes.api_link import link_api
from fixtures.operator_processes.faults import Fault, refusal
from fixtures.operator_processes.jobs import error, splits_given
from fixtures.operator_processes.link import Link, Outages, outages
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.outcomes import Outcome, find_outcome
from fixtures.operator_processes.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, metric
from support.process import Process, running
from support.waiting import wait_for

Json = dict[str, Any]
WORKERS = 4


@dataclass
class Linked:
    """A namespace, and its operator, which reaches the API server and its default MLflow server through links.

    Attributes:
        other: another namespace that the operator watches.
    """

    world: World
    other: World
    network: Outages
    api: Link
    mlflow: Link
    operator: Process

    def reconnect(self) -> None:
        """Close all connections to the API server."""
        with self.network.outage(self.api, "refuses"):
            pass


@pytest.fixture(scope="module")
def linked(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Linked]:
    folder = tmp_path_factory.mktemp("linked")
    namespaces = [new_namespace(api) for _ in range(2)]
    with outages() as network:
        link, linked_kubeconfig = link_api(network, kubeconfig, folder / "kubeconfig")
        # Every list of several objects has several pages.
        link.rewrites[f"limit={page_objects()}".encode()] = b"limit=1"
        mlflow = network.link(mlflow_server.port)
        settings = {
            "FINETUNE_NAMESPACES": ",".join(namespaces),
            "FINETUNE_TRACKING_URI": f"http://127.0.0.1:{mlflow.port}",
            "FINETUNE_WORKERS": str(WORKERS),
            # NB: the operator must find out by its watches what the tests do.
            "FINETUNE_RESYNC_SECONDS": "600",
        }
        operator = forked_operator(linked_kubeconfig, folder / "operator.log", settings)
        world, other = (World(api, mlflow_server, namespace) for namespace in namespaces)
        with running(operator):
            wait_for(
                "the operator leads",
                lambda: metric(operator, "finetune_operator_is_leader") == 1,
                120,
                operator,
            )
            # Its pods are there whenever pods are listed, so that the list has a second page.
            world.submit(splits_given("first"))
            world.run_pods("first-train-1", 2)
            yield Linked(world, other, network, api=link, mlflow=mlflow, operator=operator)
        print(operator.log.read_text(encoding="utf-8"))


def page_objects() -> int:
    """How many objects the operator's watches list at once."""
    settings = OperatorSettings()
    watches.configure(settings)
    return settings.watching.chunk_size or 0


def fail_first_attempt(world: World, name: str) -> None:
    """Play a job whose first attempt fails, until its second one runs."""
    world.run_pods(f"{name}-train-1", 2)
    world.end_pods(f"{name}-train-1", [1, 1], [error("Boom", "!"), error("PeerLost", "rank 0 is gone")])
    world.run_pods(f"{name}-train-2", 2)
    world.wait_phase(name, "Training")


EXPIRED = refusal(410, "Expired", "too old resource version: 1 (2)")
LEADER_CHANGED = refusal(500, "InternalError", "etcdserver: leader changed")
BUSY = refusal(429, "TooManyRequests", "the server has received too many requests", retryAfterSeconds=2)
CONFLICT = refusal(409, "Conflict", "the object has been modified; please apply your changes to it anew")
WATCH = "^GET .*/{namespace}/{plural}.*watch=true"


def ended_watch(plural: str, status: Json) -> Fault:
    """A watch that ends with an error in its stream."""
    return Fault(WATCH.replace("{plural}", plural), 200, {"type": "ERROR", "object": status})


FAULTS: dict[str, list[Fault]] = {
    "410 to watches": [
        Fault(WATCH.replace("{plural}", plural), 410, EXPIRED) for plural in ("finetunejobs", "jobs", "pods")
    ],
    "410 in a watch and then to the next page of its list": [
        ended_watch("pods", EXPIRED),
        Fault("^GET .*/{namespace}/pods.*continue=", 410, EXPIRED),
    ],
    "another error in watches": [ended_watch(plural, LEADER_CHANGED) for plural in ("finetunejobs", "jobs")],
    "409 to the third status write and to a Service": [
        Fault("^PATCH .*/{namespace}/finetunejobs/{name}/status", 409, CONFLICT, skips=2),
        Fault("^POST .*/{namespace}/services", 409, CONFLICT),
    ],
    "429 with Retry-After to a Job and to a watch": [
        Fault("^POST .*/{namespace}/jobs", 429, BUSY, {"Retry-After": "2"}, skips=1),
        Fault(WATCH.replace("{plural}", "jobs"), 429, BUSY, {"Retry-After": "2"}),
    ],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_an_api_server_that_refuses(
    linked: Linked, faults: list[Fault], request: pytest.FixtureRequest
) -> None:
    world, number = linked.world, [*FAULTS].index(request.node.callspec.id)
    name, pid = f"refused-{number}", linked.operator.pid
    faults = copy.deepcopy(faults)
    for fault in faults:
        fault.requests = fault.requests.format(namespace=world.namespace, name=name)
    linked.api.faults = faults
    linked.reconnect()
    world.submit(splits_given(name))
    fail_first_attempt(world, name)
    wait_for("every fault was met", lambda: all(fault.is_over for fault in faults), 30, linked.operator)
    assert find_outcome(world, name) == Outcome.of(name, "Training", attempts=2, restarts=1)
    assert linked.operator.pid == pid
    world.api.delete("FineTuneJob", world.namespace, name)


def test_a_slow_api_server(linked: Linked) -> None:
    linked.api.lag_seconds = 0.3
    with linked.network.outage(linked.api, "lags"):
        linked.world.submit(splits_given("late"))
        fail_first_attempt(linked.world, "late")
    assert find_outcome(linked.world, "late") == Outcome.of("late", "Training", attempts=2, restarts=1)
    linked.world.api.delete("FineTuneJob", linked.world.namespace, "late")


def test_a_slow_mlflow_server_delays_no_other_job(linked: Linked) -> None:
    world, other = linked.world, linked.other
    # A request of the operator ends after 10 s, and a run takes several.
    linked.mlflow.lag_seconds = 8
    slow_jobs = [f"slow-{number}" for number in range(WORKERS + 2)]
    with linked.network.outage(linked.mlflow, "lags"):
        for name in slow_jobs:
            world.submit(splits_given(name))
        other.submit(splits_given("other", tracking={"uri": other.mlflow.uri}))
        fail_first_attempt(other, "other")
        outcomes = [find_outcome(world, name) for name in slow_jobs]
        assert min(outcome.runs for outcome in outcomes) == 0, outcomes
    assert find_outcome(other, "other") == Outcome.of("other", "Training", attempts=2, restarts=1)
    for name in slow_jobs:
        world.run_pods(f"{name}-train-1", 2)
        world.wait_phase(name, "Training")
    assert {name: find_outcome(world, name) for name in slow_jobs} == {
        name: Outcome.of(name, "Training", attempts=1, restarts=0) for name in slow_jobs
    }
    assert "Traceback" not in linked.operator.log.read_text(encoding="utf-8")


def test_writes_that_mlflow_does_not_answer_delay_no_other_job(linked: Linked) -> None:
    world, other = linked.world, linked.other
    closing_jobs = [f"closing-{number}" for number in range(WORKERS + 2)]
    for name in closing_jobs:
        world.submit(splits_given(name))
    other.submit(splits_given("beside", tracking={"uri": other.mlflow.uri}))
    for owner, name in [*((world, name) for name in closing_jobs), (other, "beside")]:
        owner.run_pods(f"{name}-train-1", 2)
        owner.wait_phase(name, "Training")
    linked.mlflow.held_requests = "^POST .*/runs/update"
    for name in closing_jobs:
        world.end_pods(f"{name}-train-1", [64, 64], [error("Boom", "!"), error("PeerLost", "rank 0 is gone")])
    wait_for("runs are being closed", lambda: linked.mlflow.held, 30, linked.operator)
    began = time.monotonic()
    other.end_pods("beside-train-1", [1, 1], [error("Boom", "!"), error("PeerLost", "rank 0 is gone")])
    other.wait_pods("beside-train-2", 2)
    # A request that gets no response takes 10 s, and those of the other jobs have just begun.
    assert time.monotonic() - began < 8
    linked.mlflow.held_requests = ""
    for name in closing_jobs:
        world.wait_condition(name, "Tracked", "RunFinished")
    assert "Traceback" not in linked.operator.log.read_text(encoding="utf-8")
