"""What is remembered of registries between passes, for whom, and for how long."""

from __future__ import annotations

import asyncio
import base64
import threading

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.modelpromotion.model import SourceJob
from finetune_operator.modelpromotion.observe import read_promotion
from finetune_operator.registry.base import ModelVersion, RegisteredModel, Registry
from worlds.memory.promotions import MODEL, Json, Operator, World

AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://runs:5000 cannot be reached: HTTP 429")


def world() -> World:
    """Two versions, the first of them staging's."""
    there = World()
    for version in ("1", "2"):
        there.registry.add(version)
    there.registry.aliases["staging"] = "1"
    return there


SHARED: dict[str, tuple[Json, bool]] = {
    "the same servers and credentials": ({}, True),
    "another tracking server": (
        {"uri": "http://runs:5000", "registryUri": "http://mlflow:5000"},
        False,
    ),
    "a Secret of its own": ({"secretRef": {"name": "login"}}, False),
}


@pytest.mark.parametrize(("tracking", "shared"), SHARED.values(), ids=SHARED)
async def test_who_waits_for_a_server_that_did_not_answer(
    tracking: Json, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = world()
    data = {"MLFLOW_TRACKING_TOKEN": base64.b64encode(b"token").decode()}
    there.kube.keep({"kind": "Secret", "metadata": {"name": "login"}, "data": data})
    there.submit("one", tracking=tracking or None)
    there.submit("other")
    read, away = there.registry.version, [True]

    def version(name: str, number: str) -> ModelVersion | None:
        if away:
            raise ExternalError(AWAY)
        return read(name, number)

    monkeypatch.setattr(there.registry, "version", version)
    await there.operator.look("one")
    away.clear()
    await there.operator.look("other")
    assert there.says("RegistryReady", "one") == (AWAY.reason, AWAY.message)
    said = there.says("RegistryReady", "other")
    assert said == (
        (AWAY.reason, AWAY.message) if shared else ("RegistryReady", "the model registry answers")
    )


@pytest.mark.parametrize("on_drift", ["Repair", "Adopt", "Warn"])
async def test_the_move_of_another_replica_is_no_drift(on_drift: str) -> None:
    there = world()
    there.submit(onDrift=on_drift)
    await there.settle()
    other = Operator(there, "other")
    there.registry.aliases["staging"] = "2"
    there.seconds += 5
    await other.look("champion")
    for _ in range(2):
        # What is only journalled is carried out by the one, then recorded; the other remembers how it was before.
        await there.operator.look("champion")
    there.seconds += 1
    assert (there.registry.aliases["champion"], there.status().promoted) == ("2", "2")
    await other.look("champion")
    assert there.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    assert (there.status().move, there.says("Drifted")) == (None, None)
    await there.settle()
    assert there.registry.moves == [("champion", "1"), ("champion", "2")]


async def test_what_is_as_it_should_be_is_read_once_for_all() -> None:
    there = world()
    for name in ("one", "other"):
        there.submit(name)
    await there.settle()
    there.seconds += 5
    asked = there.registry.asked
    for name in ("one", "other", "one"):
        await there.operator.look(name)
    assert there.registry.asked == asked + 1


async def test_a_read_that_began_before_a_write_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    there = world()
    there.submit(onDrift="Adopt")
    there.submit("fixed", source={"type": "Version", "version": "1"})
    await there.settle()
    there.registry.aliases["staging"] = "2"
    there.seconds += 5
    await there.operator.look("champion")
    read, begun, finish = there.registry.model, threading.Event(), threading.Event()

    def slow(name: str) -> RegisteredModel | None:
        found = read(name)
        begun.set()
        assert finish.wait(10)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(there.registry, "model", slow)
        there.seconds += 5
        other = asyncio.create_task(there.operator.look("fixed"))
        assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        await there.operator.look("champion")
    finish.set()
    await other
    remembered = there.operator.reconciler.observer._models.values()
    assert [dict(item.model.aliases) for item in remembered if item.model] == [there.registry.aliases]
    await there.operator.look("champion")
    assert there.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]


async def test_a_read_that_ends_after_a_newer_one_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    there = world()
    for name in ("one", "other"):
        there.submit(name, source={"type": "Version", "version": "1"})
    await there.settle()
    read, begun, finish = there.registry.model, threading.Event(), threading.Event()

    def slow(name: str) -> RegisteredModel | None:
        found = read(name)
        begun.set()
        assert finish.wait(10)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(there.registry, "model", slow)
        there.seconds += 5
        one = asyncio.create_task(there.operator.look("one"))
        assert await asyncio.to_thread(begun.wait, 10)
    there.registry.aliases["staging"] = "2"
    await there.operator.look("other")
    finish.set()
    await one
    remembered = there.operator.reconciler.observer._models.values()
    assert [item.model.aliases["staging"] for item in remembered if item.model] == ["2"]


async def test_models_that_are_no_longer_read_are_forgotten() -> None:
    there = world()
    there.submit()
    there.submit("gone", model="other", source={"type": "Version", "version": "1"})
    await there.settle()
    remembered = there.operator.reconciler.observer._models
    assert {model for _, model, _ in remembered} == {"support-llama", "other"}
    there.remove("gone")
    there.seconds += 10 * there.settings.poll_seconds
    await there.settle()
    assert {model for _, model, _ in there.operator.reconciler.observer._models} == {"support-llama"}


JOBS: dict[str, tuple[Json, SourceJob]] = {
    "in the same registry": ({}, SourceJob("Succeeded", MODEL, "1")),
    "in the same registry, written otherwise": (
        {"uri": "http://MLflow:5000/"},
        SourceJob("Succeeded", MODEL, "1"),
    ),
    "in another registry": (
        {"uri": "http://other:5000"},
        SourceJob("Succeeded", MODEL, elsewhere="http://other:5000"),
    ),
    "in another registry, with a password": (
        {"uri": "http://me:secret@other:5000"},
        SourceJob("Succeeded", MODEL, elsewhere="http://other:5000"),
    ),
    "in another registry beside the same server": (
        {"registryUri": "http://Other:5000/"},
        SourceJob("Succeeded", MODEL, elsewhere="http://other:5000"),
    ),
}


@pytest.mark.parametrize(("tracking", "expected"), JOBS.values(), ids=JOBS)
async def test_where_the_job_of_a_source_registers(tracking: Json, expected: SourceJob) -> None:
    there = world()
    there.submit(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    there.kube.keep(
        {
            "kind": "FineTuneJob",
            "metadata": {"name": "tune"},
            "spec": {"tracking": tracking},
            "status": {"phase": "Succeeded", "model": {"name": MODEL, "version": "1"}},
        }
    )
    there.operator.watch()
    promotion = read_promotion(there.kube.objects["ModelPromotion", "team", "champion"])
    observed = await there.operator.reconciler.observer.observe(promotion)
    assert observed.job == expected
    await there.settle()
    assert there.registry.aliases.get("champion") == expected.version


async def test_a_loop_is_observed_whether_the_registry_answers_or_not() -> None:
    there = world()
    there.submit("a", source={"type": "Alias", "alias": "b"})
    there.submit("b", source={"type": "Alias", "alias": "a"})
    there.operator.watch()
    observer = there.operator.reconciler.observer
    promotion = read_promotion(there.kube.objects["ModelPromotion", "team", "a"])
    said = "aliases a <- b <- a take their version from each other"
    assert (await observer.observe(promotion)).loop == said
    there.registry.problem = AWAY
    there.seconds += 5
    observed = await observer.observe(promotion)
    assert (observed.problem, observed.loop) == (AWAY, said)


async def test_a_registry_that_cannot_be_opened_for_lack_of_an_answer_is_not_opened_again_at_once() -> None:
    there = world()
    for name in ("one", "other"):
        there.submit(name)
    opened = 0

    def away(*_: object) -> Registry:
        nonlocal opened
        opened += 1
        raise ExternalError(AWAY)

    there.operator.reconciler.observer.open = away
    for name in ("one", "other"):
        await there.operator.look(name)
        assert there.says("RegistryReady", name) == (AWAY.reason, AWAY.message)
    assert opened == 1
