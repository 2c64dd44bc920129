"""The gauges that are published from the store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import Gauge

from finetune_crds.base import API_VERSION
from finetune_operator import metrics
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob import children
from finetune_operator.gauges import Gauges
from finetune_operator.owners import find_owner
from fixtures.operator_in_memory.decisions import controller, later, pod, stamped

Json = dict[str, Any]


def resource(name: str, phase: str | None, *, since: float | None = None, **parts: Any) -> Json:
    """A resource of namespace team, created 100 s after NOW, with a phase since so many seconds after NOW."""
    status: Json = parts.pop("status", {})
    if phase:
        status = {"phase": phase, **status}
    if since is not None:
        status["phaseTime"] = stamped(since)
    meta = {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1"}
    return {"metadata": {**meta, "creationTimestamp": stamped(100)}, "status": status, **parts}


def ready(status: str, reason: str) -> Json:
    """A status with the condition Ready, among others."""
    return {
        "conditions": [
            {"type": "Accepted", "status": "True", "reason": "Accepted"},
            {"type": "Ready", "status": status, "reason": reason},
        ]
    }


def published(
    *jobs: Json,
    promotions: tuple[Json, ...] = (),
    schedules: tuple[Json, ...] = (),
    pods: dict[str, list[Json]] | None = None,
) -> Store:
    """Publish the gauges 1,000 s after NOW."""
    store = Store(find_owner, children.recorded_jobs)
    for body in jobs:
        store.put("FineTuneJob", body)
    for body in promotions:
        store.put("ModelPromotion", body)
    for body in schedules:
        store.put("FineTuneSchedule", body)
    for job, bodies in (pods or {}).items():
        meta = {
            "namespace": "team",
            "name": f"{job}-train-1",
            "uid": f"uid-of-{job}-train-1",
            "resourceVersion": "1",
            "ownerReferences": [controller(API_VERSION, "FineTuneJob", job)],
        }
        store.put("Job", {"metadata": meta})
        for body in bodies:
            store.put("Pod", {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}})
    Gauges(store, 30, lambda: later(1000)).publish()
    return store


def samples(gauge: Gauge) -> dict[str, float]:
    """The samples of a gauge, by the values of their labels."""
    return {
        " ".join(sample.labels.values()): sample.value
        for family in gauge.collect()
        for sample in family.samples
    }


def nonzero(gauge: Gauge) -> dict[str, float]:
    return {name: value for name, value in samples(gauge).items() if value}


def test_resources_are_counted_by_their_phase() -> None:
    metrics.jobs.labels("Retired").set(3)
    published(
        resource("a", "Training"),
        resource("b", "Training"),
        resource("c", "Failed"),
        resource("new", None),
        promotions=(resource("p", "Blocked"),),
        schedules=(resource("s", "Suspended"), resource("new", None)),
    )
    assert samples(metrics.jobs) == {
        **dict.fromkeys(
            ("Queued", "Preparing", "Starting", "Evaluating", "Registering", "Suspended", "Succeeded"), 0
        ),
        "Training": 2,
        "Failed": 1,
        "Pending": 1,
    }
    assert nonzero(metrics.promotions) == {"Blocked": 1}
    assert samples(metrics.promotions)["Promoted"] == 0
    assert samples(metrics.schedules) == {"Blocked": 0, "Pending": 1, "Scheduled": 0, "Suspended": 1}


def test_resources_are_counted_by_their_condition_ready() -> None:
    metrics.promotions_ready.labels("True", "Retired").set(3)
    published(
        resource("a", "Failed", status=ready("False", "RecipeWrong")),
        resource("b", "Pending", status=ready("False", "QuotaExceeded")),
        promotions=(
            resource("a", "Promoting", status=ready("False", "DatabricksForbidden")),
            resource("b", "Promoting", status=ready("False", "DatabricksForbidden")),
            resource("c", "Promoted", status=ready("True", "MoveRefused")),
            resource("new", None),
        ),
        schedules=(resource("s", "Scheduled", status=ready("True", "JobCreated")),),
    )
    assert samples(metrics.schedules_ready) == {"True JobCreated": 1}
    assert samples(metrics.jobs_ready) == {"False RecipeWrong": 1, "False QuotaExceeded": 1}
    assert samples(metrics.promotions_ready) == {"False DatabricksForbidden": 2, "True MoveRefused": 1}


def test_the_oldest_job_of_each_phase() -> None:
    published(
        resource("a", "Training", since=400),
        resource("b", "Training", since=700),
        resource("clock of the API server is ahead", "Preparing", since=1001),
        resource("written by an earlier version", "Starting"),
        resource("c", "Failed", since=1),
        resource("new", None),
    )
    assert nonzero(metrics.job_phase_oldest_seconds) == {"Training": 600, "Pending": 900}
    assert {*samples(metrics.job_phase_oldest_seconds)} == {
        *("Pending", "Queued", "Preparing", "Starting", "Training", "Evaluating", "Registering", "Suspended")
    }


def test_jobs_whose_next_failure_is_final() -> None:
    def restarted(name: str, restarts: int, phase: str = "Training", **policy: int) -> Json:
        return resource(name, phase, status={"restarts": restarts}, spec={"runPolicy": policy})

    published(
        restarted("at the default", 3),
        restarted("below the default", 2),
        restarted("at its own limit", 1, maxRestarts=1),
        restarted("without restarts", 0, maxRestarts=0),
        restarted("failed", 3, "Failed"),
    )
    assert samples(metrics.jobs_at_restart_limit) == {"team": 2}


def test_gpus_that_pods_hold_and_how_long_they_are_idle() -> None:
    def pods(job: str, *states: tuple[str, str]) -> list[Json]:
        name = f"{job}-train-1"
        return [pod(name, index, phase, node=node, gpus=8) for index, (phase, node) in enumerate(states)]

    published(
        resource("trains", "Training", since=100),
        resource("starts", "Starting", since=400),
        resource("waits", "Pending", since=200),
        pods={
            "trains": pods("trains", ("Running", "a"), ("Running", "b")),
            "starts": pods("starts", ("Running", "c"), ("Pending", ""), ("Failed", "d")),
            "waits": pods("waits", ("Pending", "")),
        },
    )
    assert samples(metrics.gpus) == {"team Training": 16, "team Starting": 8}
    assert samples(metrics.idle_gpus_oldest_seconds) == {"team": 600}


def test_gpus_of_a_resource_of_ones_own() -> None:
    body = pod("a-train-1", node="n")
    body["spec"]["containers"][0]["resources"]["limits"] = {"example.com/npu": "4"}
    job = resource("a", "Training", spec={"distributed": {"gpu": {"resourceName": "example.com/npu"}}})
    published(job, pods={"a": [body]})
    assert samples(metrics.gpus) == {"team Training": 4}


def test_usage_of_a_namespace_begins_at_zero() -> None:
    for counter in metrics.COUNTERS_BY_NAMESPACE:
        counter.clear()
    published(resource("a", "Pending"))
    for counter in metrics.COUNTERS_BY_NAMESPACE:
        (family,) = counter.collect()
        totals = [
            (sample.labels, sample.value) for sample in family.samples if sample.name.endswith("_total")
        ]
        assert totals == [({"job_namespace": "team"}, 0)]


async def test_gauges_that_cannot_be_published_do_not_end_the_operator(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauges = Gauges(Store(find_owner, children.recorded_jobs), 0.0, lambda: later(1000))
    published_twice = asyncio.Event()
    passes: list[None] = []

    def publish() -> None:
        passes.append(None)
        if len(passes) == 2:
            published_twice.set()
        raise TypeError("a spec that does not fit")

    monkeypatch.setattr(gauges, "publish", publish)
    running = asyncio.create_task(gauges.run())
    await asyncio.wait_for(published_twice.wait(), 5)
    assert not running.done()
    running.cancel()
    assert caplog.messages[0] == "failed to publish the gauges"
