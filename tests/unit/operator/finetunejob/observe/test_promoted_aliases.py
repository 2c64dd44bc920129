"""Which aliases of a job's model a ModelPromotion keeps."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.observe.promoted_aliases import promoted_aliases
from fixtures.operator_in_memory.decisions import SETTINGS, ftj

Json = dict[str, Any]


def promotion(name: str = "prod", *, deleting: bool = False, **spec: Any) -> Json:
    meta = {"deletionTimestamp": "2026-08-01T12:00:00Z"} if deleting else {}
    return {
        "metadata": {"name": name, **meta},
        "spec": {"model": "tuned", "alias": "champion"} | spec,
        "status": says(Accepted="True", RegistryReady="True"),
    }


def says(promoted: str | None = None, **conditions: str) -> Json:
    return {
        "promoted": promoted,
        "conditions": [{"type": kind, "status": status} for kind, status in conditions.items()],
    }


OWNED: dict[str, tuple[list[Json], Json]] = {
    "none": ([], {}),
    "one": ([promotion()], {"champion": "team/prod"}),
    "the first of two": ([promotion("b"), promotion("a")], {"champion": "team/a"}),
    "of another model": ([promotion(model="other")], {}),
    "of another registry": ([promotion(tracking={"registryUri": "http://other"})], {}),
    "of the same registry, written otherwise": (
        [promotion(tracking={"uri": "http://MLflow:5000/"})],
        {"champion": "team/prod"},
    ),
    "on its way out": ([promotion(deleting=True)], {}),
    "that nobody looked at yet": ([promotion() | {"status": {}}], {}),
    "that is refused": ([promotion() | {"status": says("1", Accepted="False", RegistryReady="True")}], {}),
    "that never got at the registry": (
        [promotion() | {"status": says(Accepted="True", RegistryReady="False")}],
        {},
    ),
    "that cannot get at the registry now": (
        [promotion() | {"status": says("1", Accepted="True", RegistryReady="False")}],
        {"champion": "team/prod"},
    ),
    "without a spec": ([{"metadata": {"name": "prod"}}], {}),
}


@pytest.mark.parametrize(("promotions", "expected"), OWNED.values(), ids=OWNED)
def test_aliases_that_promotions_keep(promotions: list[Json], expected: Json) -> None:
    store = Store()
    for body in promotions:
        meta = {"namespace": "team", "resourceVersion": "1"} | body["metadata"]
        store.put("ModelPromotion", {**body, "metadata": meta})
    job = ftj(register={"model": "tuned", "aliases": ["champion"]})
    assert promoted_aliases(store, SETTINGS, job) == expected


SPELLINGS = {
    "Unity Catalog": ("databricks-uc", {"Champion": "team/prod", "CHAMPION": "team/prod"}),
    "MLflow": ("http://mlflow:5000", {}),
}


@pytest.mark.parametrize(("registry", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_unity_catalog_has_one_alias_for_all_spellings(registry: str, expected: Json) -> None:
    store, tracking = Store(), {"registryUri": registry}
    body = promotion(tracking=tracking, model="Main.Llm.Tuned")
    store.put(
        "ModelPromotion", {**body, "metadata": {"name": "prod", "namespace": "team", "resourceVersion": "1"}}
    )
    job = ftj(
        register={"model": "main.llm.tuned", "aliases": ["Champion", "CHAMPION", "other"]}, tracking=tracking
    )
    assert promoted_aliases(store, SETTINGS, job) == expected


def test_a_job_that_registers_nothing_shares_no_alias() -> None:
    store = Store()
    store.put("ModelPromotion", promotion() | {"metadata": {"name": "prod", "namespace": "team"}})
    assert promoted_aliases(store, SETTINGS, ftj()) == {}
