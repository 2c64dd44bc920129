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
from fixtures.operator_in_memory.promotions import MODEL, Json, Operator, World

AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://runs:5000 cannot be reached: HTTP 429")

BROKEN = Problem(ConditionReason.MLFLOW_ERROR, "HTTP 500")


def world() -> World:
    """Two versions, the first of them staging's."""
    simulation = World()
    for version in ("1", "2"):
        simulation.registry.add(version)
    simulation.registry.aliases["staging"] = "1"
    return simulation


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
    simulation = world()
    data = {"MLFLOW_TRACKING_TOKEN": base64.b64encode(b"token").decode()}
    simulation.kube.keep({"kind": "Secret", "metadata": {"name": "login"}, "data": data})
    simulation.submit("one", tracking=tracking or None)
    simulation.submit("other")
    read, away = simulation.registry.version, [True]

    def version(name: str, number: str) -> ModelVersion | None:
        if away:
            raise ExternalError(AWAY)
        return read(name, number)

    monkeypatch.setattr(simulation.registry, "version", version)
    await simulation.operator.look("one")
    away.clear()
    await simulation.operator.look("other")
    assert simulation.says("RegistryReady", "one") == (AWAY.reason, AWAY.message)
    condition = simulation.says("RegistryReady", "other")
    assert condition == (
        (AWAY.reason, AWAY.message) if shared else ("RegistryReady", "the model registry answers")
    )


async def test_after_an_outage_one_promotion_tries_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all tried, a registry that never answers would occupy every worker again and again."""
    simulation = world()
    for name in ("one", "other", "third"):
        simulation.submit(name)
    reads, has_begun, may_end = 0, threading.Event(), threading.Event()

    def model(_name: str) -> RegisteredModel | None:
        nonlocal reads
        reads += 1
        has_begun.set()
        assert may_end.wait(10)
        raise ExternalError(AWAY)

    monkeypatch.setattr(simulation.registry, "model", model)
    may_end.set()
    await simulation.operator.look("one")
    may_end.clear()
    has_begun.clear()
    simulation.seconds += 5
    attempt = asyncio.create_task(simulation.operator.look("one"))
    assert await asyncio.to_thread(has_begun.wait, 10)
    for name in ("other", "third"):
        await simulation.operator.look(name)
        assert simulation.says("RegistryReady", name) == (AWAY.reason, AWAY.message)
    assert reads == 2
    may_end.set()
    await attempt


@pytest.mark.parametrize("on_drift", ["Repair", "Adopt", "Warn"])
async def test_the_move_of_another_replica_is_no_drift(on_drift: str) -> None:
    simulation = world()
    simulation.submit(onDrift=on_drift)
    await simulation.settle()
    replica = Operator(simulation, "other")
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds += 5
    await replica.look("champion")
    for _ in range(2):
        # What is only journalled is carried out by the one, then recorded; the other remembers how it was before.
        await simulation.operator.look("champion")
    simulation.seconds += 1
    assert (simulation.registry.aliases["champion"], simulation.status().promoted) == ("2", "2")
    await replica.look("champion")
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    assert (simulation.status().move, simulation.says("Drifted")) == (None, None)
    await simulation.settle()
    assert simulation.registry.moves == [("champion", "1"), ("champion", "2")]


async def test_what_is_as_it_should_be_is_read_once_for_all() -> None:
    simulation = world()
    for name in ("one", "other"):
        simulation.submit(name)
    await simulation.settle()
    simulation.seconds += 5
    requests = simulation.registry.asked
    for name in ("one", "other", "one"):
        await simulation.operator.look(name)
    assert simulation.registry.asked == requests + 1


async def test_after_a_start_one_read_of_a_model_is_enough_for_all_of_its_promotions() -> None:
    simulation = world()
    names = ("one", "other", "third")
    for name in names:
        simulation.submit(name)
    await simulation.settle()
    simulation.restart()
    requests = simulation.registry.asked
    await asyncio.gather(*(simulation.operator.look(name) for name in names))
    assert simulation.registry.asked == requests + 1


async def test_a_first_read_that_fails_lets_the_others_read_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = world()
    for name in ("one", "other"):
        simulation.submit(name)
    await simulation.settle()
    simulation.restart()
    read, failures = simulation.registry.model, [ExternalError(BROKEN)]

    def model(name: str) -> RegisteredModel | None:
        if failures:
            raise failures.pop()
        return read(name)

    monkeypatch.setattr(simulation.registry, "model", model)
    await asyncio.gather(*(simulation.operator.look(name) for name in ("one", "other")))
    assert {simulation.holds("RegistryReady", name) for name in ("one", "other")} == {True, False}


async def test_a_read_that_began_before_a_write_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = world()
    simulation.submit(onDrift="Adopt")
    simulation.submit("fixed", source={"type": "Version", "version": "1"})
    await simulation.settle()
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds += 5
    await simulation.operator.look("champion")
    read, begun, finish = simulation.registry.model, threading.Event(), threading.Event()

    def slow(name: str) -> RegisteredModel | None:
        answer = read(name)
        begun.set()
        assert finish.wait(10)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(simulation.registry, "model", slow)
        simulation.seconds += 5
        pending_read = asyncio.create_task(simulation.operator.look("fixed"))
        assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        await simulation.operator.look("champion")
    finish.set()
    await pending_read
    remembered = simulation.operator.reconciler.observer.models._models.values()
    assert [dict(item.model.aliases) for item in remembered if item.model] == [simulation.registry.aliases]
    await simulation.operator.look("champion")
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]


async def test_a_read_that_ends_after_a_newer_one_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = world()
    for name in ("one", "other"):
        simulation.submit(name, source={"type": "Version", "version": "1"})
    await simulation.settle()
    read, begun, finish = simulation.registry.model, threading.Event(), threading.Event()

    def slow(name: str) -> RegisteredModel | None:
        answer = read(name)
        begun.set()
        assert finish.wait(10)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(simulation.registry, "model", slow)
        simulation.seconds += 5
        slow_read = asyncio.create_task(simulation.operator.look("one"))
        assert await asyncio.to_thread(begun.wait, 10)
    simulation.registry.aliases["staging"] = "2"
    await simulation.operator.look("other")
    finish.set()
    await slow_read
    remembered = simulation.operator.reconciler.observer.models._models.values()
    assert [item.model.aliases["staging"] for item in remembered if item.model] == ["2"]


async def test_models_that_are_no_longer_read_are_forgotten() -> None:
    simulation = world()
    simulation.submit()
    simulation.submit("gone", model="other", source={"type": "Version", "version": "1"})
    await simulation.settle()
    remembered = simulation.operator.reconciler.observer.models._models
    assert {model for _, model, _ in remembered} == {"support-llama", "other"}
    simulation.remove("gone")
    simulation.seconds += 10 * simulation.settings.poll_seconds
    await simulation.settle()
    assert {model for _, model, _ in simulation.operator.reconciler.observer.models._models} == {
        "support-llama"
    }


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
    simulation = world()
    simulation.submit(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    simulation.kube.keep(
        {
            "kind": "FineTuneJob",
            "metadata": {"name": "tune"},
            "spec": {"tracking": tracking},
            "status": {"phase": "Succeeded", "model": {"name": MODEL, "version": "1"}},
        }
    )
    simulation.operator.watch()
    promotion = read_promotion(simulation.kube.objects["ModelPromotion", "team", "champion"])
    observed = await simulation.operator.reconciler.observer.observe(promotion)
    assert observed.job == expected
    await simulation.settle()
    assert simulation.registry.aliases.get("champion") == expected.version


async def test_a_loop_is_observed_whether_the_registry_answers_or_not() -> None:
    simulation = world()
    simulation.submit("a", source={"type": "Alias", "alias": "b"})
    simulation.submit("b", source={"type": "Alias", "alias": "a"})
    simulation.operator.watch()
    observer = simulation.operator.reconciler.observer
    promotion = read_promotion(simulation.kube.objects["ModelPromotion", "team", "a"])
    sentence = "aliases a <- b <- a use each other as their source"
    assert (await observer.observe(promotion)).loop == sentence
    simulation.registry.problem = AWAY
    simulation.seconds += 5
    observed = await observer.observe(promotion)
    assert (observed.problem, observed.loop) == (AWAY, sentence)


async def test_a_registry_that_cannot_be_opened_for_lack_of_an_answer_is_not_opened_again_at_once() -> None:
    simulation = world()
    for name in ("one", "other"):
        simulation.submit(name)
    opened = 0

    def away(*_: object) -> Registry:
        nonlocal opened
        opened += 1
        raise ExternalError(AWAY)

    simulation.operator.reconciler.observer.open = away
    for name in ("one", "other"):
        await simulation.operator.look(name)
        assert simulation.says("RegistryReady", name) == (AWAY.reason, AWAY.message)
    assert opened == 1
