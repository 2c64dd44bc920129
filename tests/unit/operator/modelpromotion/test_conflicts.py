"""Who has an alias that several want, and aliases that use each other as their source."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError
from finetune_operator.modelpromotion.conflicts import Claim, ConflictFinder
from finetune_operator.modelpromotion.observe import read_promotion
from finetune_operator.registry import unity
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Fault, Workspace, running
from fixtures.fake_kube import Json, StandIn

SETTINGS = Settings(tracking_uri="http://mlflow:5000")
CATALOG = {"uri": "databricks", "registryUri": "databricks-uc", "secretRef": {"name": "login"}}
MODEL = "main.llm.support"


class World:
    """Promotions, each in a namespace of its own, the first one the oldest."""

    def __init__(self) -> None:
        self.kube = StandIn()
        self.store = Store()
        self.conflicts = ConflictFinder(self.kube, self.store, SETTINGS)

    def submit(self, namespace: str, *, status: Json | None = None, **spec: Any) -> None:
        number = len(self.store.promotions)
        stored = self.kube.keep(
            {
                "kind": "ModelPromotion",
                "metadata": {
                    "name": "prod",
                    "namespace": namespace,
                    "creationTimestamp": f"2026-08-01T12:00:{number:02}Z",
                },
                "spec": {"model": MODEL, "alias": "champion", "source": {"type": "Alias", "alias": "staging"}}
                | spec,
                "status": status or {},
            }
        )
        self.store.put("ModelPromotion", stored)

    def login(self, namespace: str, host: str, token: str = "dapi-good") -> None:  # noqa: S107
        data = {"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": token}
        encoded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
        meta = {"name": "login", "namespace": namespace}
        self.kube.keep({"kind": "Secret", "metadata": meta, "data": encoded})

    async def rival(self, namespace: str) -> str | None:
        promotion = read_promotion(self.store.promotions[namespace, "prod"])
        assert promotion.spec
        return await self.conflicts.find_alias_conflict(promotion, promotion.spec)

    async def endpoint_rival(self, namespace: str) -> str | None:
        promotion = read_promotion(self.store.promotions[namespace, "prod"])
        assert promotion.backend
        return await self.conflicts.find_endpoint_conflict(promotion, promotion.backend)

    async def loop(self, namespace: str) -> str | None:
        promotion = read_promotion(self.store.promotions[namespace, "prod"])
        assert promotion.spec
        return await self.conflicts.find_alias_loop(promotion, promotion.spec)


def not_ready(reason: ConditionReason) -> Json:
    now = "2026-08-01T12:00:00Z"
    condition_json = {"type": "RegistryReady", "status": "False", "reason": reason, "message": ""}
    return {"conditions": [condition_json | {"lastTransitionTime": now}]}


OLDER: dict[str, tuple[Json, bool]] = {
    "for the same alias": ({}, True),
    "for another alias": ({"alias": "canary"}, False),
    "for another model": ({"model": "other"}, False),
    "for a model that MLflow takes for another": ({"model": "Main.LLM.Support"}, False),
    "in another registry": ({"tracking": {"uri": "http://other:5000"}}, False),
    "in no registry at all": ({"tracking": {"uri": "http://[x"}}, False),
    "whose server is away": ({"status": not_ready(ConditionReason.MLFLOW_UNREACHABLE)}, True),
    "which may do nothing": ({"status": not_ready(ConditionReason.MLFLOW_FORBIDDEN)}, False),
    "without a workspace": ({"status": not_ready(ConditionReason.DATABRICKS_NOT_CONFIGURED)}, False),
}


@pytest.mark.parametrize(("older", "rival"), OLDER.values(), ids=OLDER)
async def test_an_older_promotion(older: Json, rival: bool) -> None:
    simulation = World()
    simulation.submit("first", **older)
    simulation.submit("mine")
    assert await simulation.rival("mine") == ("first/prod" if rival else None)
    assert await simulation.rival("first") is None


@pytest.fixture
def two() -> Iterator[tuple[Workspace, Workspace]]:
    unity._metastores.clear()
    with running() as first, running() as second:
        yield first, second
    unity._metastores.clear()


def in_catalog(two: tuple[Workspace, Workspace], **first: Any) -> World:
    """An older promotion in the one workspace, and mine in the other."""
    simulation = World()
    for namespace, state in zip(("first", "mine"), two, strict=True):
        simulation.login(namespace, state.uri)
    simulation.submit("first", tracking=CATALOG, **first)
    simulation.submit("mine", tracking=CATALOG)
    return simulation


CATALOGS: dict[str, tuple[str, Json, bool]] = {
    "that share a metastore": ("one", {}, True),
    "that share a metastore, and names written otherwise": ("one", {"model": "Main.LLM.Support"}, True),
    "that share a metastore, and other models": ("one", {"model": "main.llm.other"}, False),
    "with different metastores": ("other", {}, False),
}


@pytest.mark.parametrize(("metastore", "first", "rival"), CATALOGS.values(), ids=CATALOGS)
async def test_two_workspaces(
    two: tuple[Workspace, Workspace], metastore: str, first: Json, rival: bool
) -> None:
    two[0].metastore, two[1].metastore = metastore, "one"
    simulation = in_catalog(two, **first)
    assert await simulation.rival("mine") == ("first/prod" if rival else None)


async def test_one_workspace_is_not_asked_for_its_metastore(two: tuple[Workspace, Workspace]) -> None:
    simulation = in_catalog((two[0], two[0]))
    assert await simulation.rival("mine") == "first/prod"
    assert two[0].asked == []


@pytest.mark.parametrize("which", [0, 1], ids=["the older", "mine"])
async def test_a_metastore_that_cannot_be_read(two: tuple[Workspace, Workspace], which: int) -> None:
    two[0].metastore = "other"
    two[which].denied = {"GET /api/2.1/unity-catalog/current-metastore-assignment"}
    simulation = in_catalog(two)
    assert await simulation.rival("mine") == "first/prod"


async def test_a_workspace_that_does_not_answer(two: tuple[Workspace, Workspace]) -> None:
    two[0].metastore = "other"
    simulation = in_catalog(two)
    two[0].faults.append(Fault(503))
    assert await simulation.rival("mine") == "first/prod"
    two[0].faults.clear()
    assert await simulation.rival("mine") is None
    two[0].faults.append(Fault(503))
    assert await simulation.rival("mine") is None


async def test_a_workspace_that_is_known_not_to_answer_is_not_asked(two: tuple[Workspace, Workspace]) -> None:
    two[0].metastore = "other"
    simulation = in_catalog(two, status=not_ready(ConditionReason.DATABRICKS_UNREACHABLE))
    assert await simulation.rival("mine") == "first/prod"
    assert two[0].asked == []


async def test_a_rival_that_cannot_log_in(two: tuple[Workspace, Workspace]) -> None:
    simulation = in_catalog(two)
    simulation.login("first", two[0].uri, token="")
    assert await simulation.rival("mine") is None


async def test_a_workspace_of_mine_that_does_not_answer(two: tuple[Workspace, Workspace]) -> None:
    simulation = in_catalog(two)
    two[1].faults.append(Fault(503))
    with pytest.raises(ExternalError) as raised:
        await simulation.rival("mine")
    assert raised.value.problem.reason == ConditionReason.DATABRICKS_UNREACHABLE


LOOPS: dict[str, tuple[list[tuple[str, str]], str | None]] = {
    "none": ([("a", "b"), ("b", "c")], None),
    "of two": ([("a", "b"), ("b", "a")], "aliases a <- b <- a use each other as their source"),
    "of three": (
        [("a", "b"), ("b", "c"), ("c", "a")],
        "aliases a <- b <- c <- a use each other as their source",
    ),
    "of others": ([("a", "b"), ("b", "c"), ("c", "b")], None),
    "that the oldest of two would not close": ([("a", "b"), ("b", "c"), ("b", "a")], None),
}


@pytest.mark.parametrize(("promotions", "expected"), LOOPS.values(), ids=LOOPS)
async def test_aliases_that_take_their_version_from_each_other(
    promotions: list[tuple[str, str]], expected: str | None
) -> None:
    simulation = World()
    for number, (alias, source) in enumerate(promotions):
        simulation.submit(f"team-{number}", alias=alias, source={"type": "Alias", "alias": source})
    assert await simulation.loop("team-0") == expected


ELSEWHERE: dict[str, Json] = {
    "from a version": {"source": {"type": "Version", "version": "1"}},
    "of another model": {"model": "other"},
    "in another registry": {"tracking": {"uri": "http://other:5000"}},
}


@pytest.mark.parametrize("second", ELSEWHERE.values(), ids=ELSEWHERE)
async def test_aliases_that_close_no_loop(second: Json) -> None:
    simulation = World()
    simulation.submit("mine", alias="a", source={"type": "Alias", "alias": "b"})
    loop_spec: Json = {"alias": "b", "source": {"type": "Alias", "alias": "a"}}
    simulation.submit("other", **loop_spec | second)
    assert await simulation.loop("mine") is None


async def test_a_loop_in_one_metastore_alone(two: tuple[Workspace, Workspace]) -> None:
    simulation = in_catalog(two, alias="Staging", source={"type": "Alias", "alias": "champion"})
    sentence = "aliases champion <- staging <- champion use each other as their source"
    assert await simulation.loop("mine") == sentence
    unity._metastores.clear()
    two[0].metastore = "other"
    assert await simulation.loop("mine") is None


def serving(endpoint: str = "support", **databricks: Any) -> Json:
    """spec.serving with an endpoint in the workspace of the Secret."""
    settings = {"secretRef": {"name": "login"}, **databricks}
    return {"type": "Databricks", "endpoint": endpoint, "databricks": settings}


ENDPOINTS: dict[str, tuple[Json | None, bool]] = {
    "none": (None, False),
    "the same": (serving(), True),
    "the same, on another machine": (serving(workloadType="GPUSmall"), True),
    "another": (serving("other"), False),
    "the same, as an earlier version stored it": (
        {"type": "Databricks", "databricks": {"endpoint": "support", "secretRef": {"name": "login"}}},
        True,
    ),
    "another, as an earlier version stored it": (
        {"type": "Databricks", "databricks": {"endpoint": "other", "secretRef": {"name": "login"}}},
        False,
    ),
    "another, beside the same as an earlier version stored it": (
        {
            "type": "Databricks",
            "endpoint": "other",
            "databricks": {"endpoint": "support", "secretRef": {"name": "login"}},
        },
        False,
    ),
    "the same, with a spec that cannot be read": (serving(workloadType="later"), False),
    "the same, with a Secret that does not exist": (serving(secretRef={"name": "missing"}), False),
}


@pytest.mark.parametrize(("older", "rival"), ENDPOINTS.values(), ids=ENDPOINTS)
@pytest.mark.parametrize("host", ["https://one", "https://ONE"])
async def test_an_endpoint_that_an_older_promotion_has(older: Json | None, rival: bool, host: str) -> None:
    simulation = World()
    for namespace, address in (("first", host), ("second", "https://one")):
        simulation.login(namespace, address)
    simulation.submit("first", alias="other", **({"serving": older} if older else {}))
    simulation.submit("second", serving=serving())
    assert await simulation.endpoint_rival("second") == ("first/prod" if rival else None)


async def test_endpoints_of_two_workspaces_are_two() -> None:
    simulation = World()
    for namespace in ("one", "other"):
        simulation.login(namespace, f"https://{namespace}")
        simulation.submit(namespace, serving=serving())
    assert await simulation.endpoint_rival("other") is None


async def test_the_conflicts_of_thousands_of_promotions_look_at_those_of_each_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 promotions of 1,000 models: a pass over each one must not look at all others."""
    world = World()
    for number in range(1000):
        for alias, source in (("staging", "candidate"), ("champion", "staging")):
            body = {
                "kind": "ModelPromotion",
                "metadata": {
                    "name": f"{number}-{alias}",
                    "namespace": "team",
                    "uid": f"{number}-{alias}",
                    "resourceVersion": "1",
                    "creationTimestamp": "2026-08-01T12:00:00Z",
                },
                "spec": {"model": f"m{number}", "alias": alias, "source": {"type": "Alias", "alias": source}},
            }
            world.store.put("ModelPromotion", body)
    compared: list[Json] = []
    manages = ConflictFinder._manages

    def count_and_compare(finder: ConflictFinder, spec: Json, claim: Claim) -> bool:
        compared.append(spec)
        return manages(finder, spec, claim)

    monkeypatch.setattr(ConflictFinder, "_manages", count_and_compare)
    for body in world.store.promotions.values():
        promotion = read_promotion(body)
        assert promotion.spec
        assert await world.conflicts.find_alias_conflict(promotion, promotion.spec) is None
        assert await world.conflicts.find_alias_loop(promotion, promotion.spec) is None
    assert len(compared) <= 3 * len(world.store.promotions)
