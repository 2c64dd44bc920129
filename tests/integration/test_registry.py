"""The model registry and the one writer of its aliases: a real MLflow on each of its databases, real Leases."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.leases import LeaseBusy, Leases
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.registry.base import ModelVersion, MoveAlias, RegisteredModel
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.writer import ANYWHERE, AliasMoved, AliasWriter, build_lease_name
from finetune_operator.settings import Settings
from fixtures.operator_processes.proxy import Failure, Proxy, proxy
from integration.postgres import postgres
from support.api import Api
from support.mlflow_server import Mlflow
from support.process import running

# NB: MLflow's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=["SQLite", "PostgreSQL"])
def mlflow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """A real MLflow server on each database."""
    if request.param == "SQLite":
        yield request.getfixturevalue("mlflow_server")
        return
    with postgres() as database:
        server = Mlflow(tmp_path_factory.mktemp("mlflow-postgres"), database, forked=True)
        with running(server):
            yield server


@pytest.fixture
def registry(mlflow: Mlflow) -> MlflowRegistry:
    return MlflowRegistry(mlflow.uri, mlflow.uri)


def new_name(words: str = "model") -> str:
    return f"{words} {uuid.uuid4().hex[:8]}"


def new_run(mlflow: Mlflow, **metrics: Any) -> str:
    run_id = str(mlflow.post("runs/create", {"experiment_id": "0"})["run"]["info"]["run_id"])
    if metrics:
        mlflow.log_metrics(run_id, **metrics)
    return run_id


def new_model(mlflow: Mlflow, versions: int = 1, name: str | None = None) -> str:
    """A model with versions 1, 2 and so on."""
    name, run_id = name or new_name(), new_run(mlflow)
    for _ in range(versions):
        mlflow.register(name, run_id)
    return name


NAMES = {
    "quotes": 'it\'s "mine" and `yours`',
    "signs": "100% a&b?c#d+e;f=g",
    "another script": "ünï 模型 🙂",
    "dots": "catalog.schema.name",
}


@pytest.mark.parametrize("words", NAMES.values(), ids=NAMES)
def test_a_model_of_any_name(mlflow: Mlflow, registry: MlflowRegistry, words: str) -> None:
    name = new_model(mlflow, 2, new_name(words))
    registry.set_alias(name, "champion", "1")
    registry.set_alias(name, "candidate", "2")
    registry.set_alias(name, "champion", "2")
    registry.set_tags(name, "2", {"finetune.dev/a": "it's 模型", "b": ""})
    assert registry.model(name) == RegisteredModel(name, {"champion": "2", "candidate": "2"})
    version = registry.version(name, "2")
    assert version is not None
    assert (version.version, version.tags) == ("2", {"finetune.dev/a": "it's 模型", "b": ""})
    for _ in range(2):
        registry.delete_alias(name, "champion")
    assert registry.model(name) == RegisteredModel(name, {"candidate": "2"})
    found_version = registry.find_version(name, str(version.run_id), ["candidate", "champion"])
    assert found_version is not None
    assert (found_version.version, found_version.aliases) == ("2", frozenset({"candidate"}))
    assert found_version.tags == version.tags


def test_a_name_that_no_model_can_have_is_refused_in_words(registry: MlflowRegistry) -> None:
    with pytest.raises(ExternalError) as raised:
        registry.model("a/b")
    assert "refuses registered-models/get (INVALID_PARAMETER_VALUE, HTTP 400)" in raised.value.problem.message


def test_what_does_not_exist(mlflow: Mlflow, registry: MlflowRegistry) -> None:
    name = new_model(mlflow, 2)
    registry.set_alias(name, "champion", "2")
    mlflow_delete(mlflow, name, "2")
    assert registry.model("none " + name) is None
    assert [registry.version(name, number) for number in ("2", "3", "2147483648", "9999999999")] == [None] * 4
    assert registry.version("none " + name, "1") is None
    assert registry.model(name) == RegisteredModel(name)
    registry.delete_alias("none " + name, "champion")
    with pytest.raises(ExternalError) as raised:
        registry.set_alias(name, "champion", "3")
    assert raised.value.problem.reason == ConditionReason.MLFLOW_ERROR
    assert "RESOURCE_DOES_NOT_EXIST" in raised.value.problem.message


def mlflow_delete(mlflow: Mlflow, name: str, version: str) -> None:
    """Delete a version, as somebody does."""
    import requests

    body = {"name": name, "version": version}
    requests.delete(
        f"{mlflow.uri}/api/2.0/mlflow/model-versions/delete", json=body, timeout=10
    ).raise_for_status()


def test_a_version_with_the_metrics_of_its_run(mlflow: Mlflow, registry: MlflowRegistry) -> None:
    name = new_name()
    run_id = new_run(mlflow, eval_loss=2.5, odd="NaN", high="Infinity", low="-Infinity")
    mlflow.post("runs/set-tag", {"run_id": run_id, "key": contract.TAG_EVAL_DATA, "value": "d1"})
    mlflow.register(name, run_id)
    version = registry.version(name, "1")
    assert version is not None
    odd = version.metrics["odd"]
    comparable_metrics = {key: value for key, value in version.metrics.items() if key != "odd"}
    assert math.isnan(odd)
    assert comparable_metrics == {"eval_loss": 2.5, "high": math.inf, "low": -math.inf}
    assert (version.ready, version.run_id, version.tags, version.evaluated_on) == (True, run_id, {}, "d1")
    registry.set_tags(name, "1", {contract.TAG_EVAL_DATA: "d2"})
    version = registry.version(name, "1")
    assert version is not None
    assert version.evaluated_on == "d2"


RUNS: dict[str, str | None] = {
    "no run": None,
    "a run that is gone": uuid.uuid4().hex,
    "what is no run": "../of somebody's/own",
}


@pytest.mark.parametrize("run_id", RUNS.values(), ids=RUNS)
def test_a_version_without_a_run(mlflow: Mlflow, registry: MlflowRegistry, run_id: str | None) -> None:
    name = new_name()
    mlflow.post("registered-models/create", {"name": name})
    body = {"name": name, "source": "s3://bucket/model"}
    mlflow.post("model-versions/create", body if run_id is None else {**body, "run_id": run_id})
    assert registry.version(name, "1") == ModelVersion("1", run_id=run_id)


@dataclass(frozen=True)
class Watched(MlflowRegistry):
    """Notes how many write at the same time."""

    inside: list[int] = field(default_factory=lambda: [0])
    most: list[int] = field(default_factory=lambda: [0])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        with self.lock:
            self.inside[0] += 1
            self.most[0] = max(self.most[0], self.inside[0])
        super().set_alias(name, alias, version)
        with self.lock:
            self.inside[0] -= 1


Writers = Callable[[str], Awaitable[AliasWriter]]


@pytest.fixture
async def writer_of(
    kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Writers]:
    """Makes writers, each with a client of its own, whose Leases last 3 s."""
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    async with AsyncExitStack() as leaving:

        async def make(identity: str) -> AliasWriter:
            kube = await leaving.enter_async_context(Kube())
            settings = Settings(namespace=namespace)
            return AliasWriter(kube, settings, identity, lease_seconds=3, write_seconds=1.5)

        yield make


async def moved(
    writer: AliasWriter, registry: MlflowRegistry, model: str, move: MoveAlias, alias: str = "champion"
) -> int:
    """Move the alias as the operator does, which comes back while the Lease is held or MLflow slow; how often it was.

    NB: clients wait so shortly in some of these tests that a busy machine makes them give up.
    """
    deadline = time.monotonic() + 60
    busy = 0
    while time.monotonic() < deadline:
        try:
            await writer.move(registry, model, alias, move)
        except LeaseBusy:
            busy += 1
            await asyncio.sleep(0.05)
        except ExternalError as error:
            if error.problem.reason != ConditionReason.MLFLOW_UNREACHABLE:
                raise
        else:
            return busy
    raise AssertionError("the Lease was held for a minute")


async def test_writers_that_race_take_turns(
    mlflow: Mlflow, api: Api, namespace: str, writer_of: Writers
) -> None:
    count = 20
    registry = Watched(mlflow.uri, mlflow.uri)
    model = new_model(mlflow, count + 1)
    registry.set_alias(model, "champion", "1")
    writers = [await writer_of("operator-1"), await writer_of("operator-2")]
    done: list[tuple[str, str]] = []
    refused: list[tuple[str | None, str]] = []

    async def one(number: int) -> None:
        """Read, and move on from what was read, until it was done."""
        while True:
            current = await asyncio.to_thread(registry.model, model)
            assert current is not None
            expected = current.aliases["champion"]
            move = MoveAlias(expected, str(number), tags={"by": f"task {number}"})
            try:
                await moved(writers[number % 2], registry, model, move)
            except AliasMoved as error:
                refused.append((error.actual, expected))
            else:
                done.append((expected, str(number)))
                return

    await asyncio.gather(*(one(number) for number in range(2, count + 2)))
    chain = dict(done)
    reached = ["1"]
    while reached[-1] in chain:
        reached.append(chain[reached[-1]])
    final_model = registry.model(model)
    assert final_model is not None
    assert (len(reached), final_model.aliases) == (count + 1, {"champion": reached[-1]})
    assert [pair for pair in refused if pair[0] == pair[1]] == []
    assert (bool(refused), registry.most) == (True, [1])
    tags = [getattr(registry.version(model, number), "tags", None) for number in reached[1:]]
    assert tags == [{"by": f"task {number}"} for number in reached[1:]]
    assert api.list("Lease", namespace) == []


async def test_a_holder_that_died_is_replaced(
    mlflow: Mlflow, registry: MlflowRegistry, api: Api, namespace: str, writer_of: Writers
) -> None:
    model = new_model(mlflow)
    writer = await writer_of("operator-2")
    dead = Leases(writer.kube, namespace, "operator-1", 2, time.monotonic)
    lease = await dead.acquire(build_lease_name(registry.uri, model), "aliases")
    spec = api.list("Lease", namespace)[0]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("operator-1", 2)
    assert await moved(writer, registry, model, MoveAlias(None, "1")) > 0
    assert registry.model(model) == RegisteredModel(model, {"champion": "1"})
    with pytest.raises(LeaseBusy):
        await dead.renew(lease)
    assert api.list("Lease", namespace) == []


async def test_a_holder_that_comes_back_keeps_its_lease_and_gives_back_no_other(
    api: Api, namespace: str, writer_of: Writers
) -> None:
    first = Leases((await writer_of("a")).kube, namespace, "operator-1", 2, time.monotonic)
    lease = await first.acquire("one", "aliases")
    renewed = await first.renew(lease)
    await first.release(lease)
    spec = api.list("Lease", namespace)[0]["spec"]
    assert (spec["holderIdentity"], spec["acquireTime"]) == ("operator-1", lease.body["spec"]["acquireTime"])
    await first.release(renewed)
    assert api.list("Lease", namespace) == []
    with pytest.raises(LeaseBusy):
        await first.renew(renewed)


@pytest.fixture
def failing(mlflow: Mlflow) -> Iterator[Proxy]:
    """MLflow behind a proxy."""
    with proxy(mlflow.uri) as relay:
        yield relay


READ_MODEL, READ_VERSION = "GET registered-models/get", "GET model-versions/get"
TAG, ALIAS = "POST model-versions/set-tag", "POST registered-models/alias"
FAILURES: dict[str, tuple[str, Failure]] = {
    f"{name} {failure}": (path, failure)
    for name, path in {
        "the model": READ_MODEL,
        "the version": READ_VERSION,
        "the tag": TAG,
        "the alias": ALIAS,
    }.items()
    for failure in ("breaks", "is lost")
} | {
    "the tag is done without an answer": (TAG, "is done without an answer"),
    "the alias is done without an answer": (ALIAS, "is done without an answer"),
}


@pytest.mark.parametrize(("path", "failure"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_anywhere_is_made_up_for(
    *,
    mlflow: Mlflow,
    failing: Proxy,
    api: Api,
    namespace: str,
    writer_of: Writers,
    path: str,
    failure: Failure,
) -> None:
    direct, registry = MlflowRegistry(mlflow.uri, mlflow.uri), MlflowRegistry(failing.uri, failing.uri)
    model = new_model(mlflow, 2)
    direct.set_alias(model, "champion", "1")
    writer = await writer_of("operator-1")
    move = MoveAlias("1", "2", tags={"by": "me"})
    failing.failures[path] = failure
    with pytest.raises(ExternalError) as raised:
        await writer.move(registry, model, "champion", move)
    reason = ConditionReason.MLFLOW_ERROR if failure == "breaks" else ConditionReason.MLFLOW_UNREACHABLE
    assert (raised.value.problem.reason, len(failing.met)) == (reason, 1)
    model_after = direct.model(model)
    # The tags come after the alias.
    done = path == TAG or (path == ALIAS and failure == "is done without an answer")
    assert model_after == RegisteredModel(model, {"champion": "2" if done else "1"})
    await moved(writer, registry, model, move)
    version = direct.version(model, "2")
    assert direct.model(model) == RegisteredModel(model, {"champion": "2"})
    assert version is not None
    assert (version.tags, api.list("Lease", namespace)) == ({"by": "me"}, [])


async def test_a_write_that_arrives_late_is_waited_for(
    mlflow: Mlflow, failing: Proxy, writer_of: Writers
) -> None:
    registry = MlflowRegistry(failing.uri, failing.uri)
    model = new_model(mlflow, 3)
    registry.set_alias(model, "champion", "1")
    first, second = await writer_of("operator-1"), await writer_of("operator-2")
    failing.failures[ALIAS] = "is late"
    with pytest.raises(ExternalError):
        await first.move(registry, model, "champion", MoveAlias("1", "2"))
    assert await moved(second, registry, model, MoveAlias(ANYWHERE, "3")) > 0
    assert failing.late.is_set()
    assert registry.model(model) == RegisteredModel(model, {"champion": "3"})
