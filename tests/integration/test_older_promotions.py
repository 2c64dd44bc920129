"""A ModelPromotion that an earlier version stored, with fields that are refused by now and a phase that is no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fixtures.operator_processes.operators import new_namespace
from integration.older_kind import OlderKind, is_taken
from integration.schema.promotions import promotion
from support.api import Api
from support.refusals import refused
from support.waiting import wait_for

Json = dict[str, Any]


def stored(previous_percent: int) -> Json:
    """What the earlier version stored. Its API server filled in a `previousPercent` of 0."""
    return promotion(
        approval={"version": 1, "by": "kim"},
        serving={
            "type": "Databricks",
            "databricks": {
                "endpoint": "support",
                "previousPercent": previous_percent,
                "canary": {"steps": [{"percent": 5, "durationSeconds": 60}]},
            },
        },
    )


OLDER = stored(previous_percent=0)
SHARED = stored(previous_percent=20)
CHANGES: dict[str, Json] = {
    "suspended": {"suspend": True},
    "approved": {"approvals": [{"version": 2, "by": "kim"}]},
    "rolled back": {"rollbackTo": {"type": "Previous"}},
    "another machine": {"serving": {"databricks": {"workloadType": "GPUSmall"}}},
    "written anew": {
        "approval": {"version": None, "by": None},
        "approvals": [{"version": 1, "by": "kim"}],
        "serving": {
            "endpoint": "support",
            "databricks": {"endpoint": None, "previousPercent": None, "canary": None},
        },
    },
    "written anew, without a word on what the API server filled in": {
        "serving": {
            "endpoint": "support",
            "canary": {"steps": [{"percent": 5, "durationSeconds": 60}]},
            "databricks": {"canary": None},
        },
    },
}
# Of the promotion with a share for the version before: what would lose a field without a word.
REFUSED: dict[str, tuple[Json, str]] = {
    "the endpoint without its canary": (
        {"endpoint": "support", "databricks": {"previousPercent": None}},
        "serving.databricks.canary was replaced by serving.canary: move it",
    ),
    "a canary that is a second one": (
        {
            "endpoint": "support",
            "canary": {"steps": [{"percent": 5, "durationSeconds": 60}]},
            "databricks": {"previousPercent": None},
        },
        "serving.databricks.canary was replaced by serving.canary: move it",
    ),
    "the endpoint without the share of the version before": (
        {"endpoint": "support", "databricks": {"canary": None}},
        "serving.databricks.previousPercent was removed: after a rollout the new version receives all traffic",
    ),
}


OLDER_KIND = OlderKind("OlderPromotion", "finetune.dev_modelpromotions.yaml")


def of_older(name: str, namespace: str, body: Json = OLDER) -> Json:
    """A promotion as an object of the test's own kind."""
    return {**body, "kind": OLDER_KIND.kind, "metadata": {"name": name, "namespace": namespace}}


def without_rules(schema: Any) -> Any:
    """A schema without rules, which takes any phase."""
    if isinstance(schema, list):
        return [without_rules(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: without_rules(part) for name, part in schema.items() if name != "x-kubernetes-validations"}
    if "Blocked" in parts.get("enum", []):
        del parts["enum"]
    return parts


@pytest.fixture(scope="module")
def older(api: Api) -> str:
    """A namespace with a promotion for each change, and one for those that are refused, all of them older than the rules."""
    namespace = new_namespace(api)
    OLDER_KIND.create(api, without_rules)
    for number in range(len(CHANGES)):
        name = name_of(number)
        wait_for("the promotion is stored", partial(is_taken, api, of_older(name, namespace)))
        api.patch("OlderPromotion", namespace, name, {"status": {"phase": "Drifted"}}, status=True)
    api.create(of_older("shared", namespace, SHARED))
    OLDER_KIND.add_rules(api)
    wait_for("the rules count", lambda: not is_taken(api, of_older("new", namespace), dry_run=True))
    return namespace


def name_of(number: int) -> str:
    return f"promotion-{number}"


def test_a_new_one_is_refused(api: Api, older: str) -> None:
    with refused("spec.serving.databricks.endpoint: Invalid value: replaced by serving.endpoint"):
        api.create(of_older("new", older))


@pytest.mark.parametrize("case", CHANGES)
def test_one_that_exists_can_be_changed_and_reported_on(api: Api, older: str, case: str) -> None:
    name = name_of([*CHANGES].index(case))
    # What leaves the phase of the earlier version where it is.
    api.patch("OlderPromotion", older, name, {"status": {"current": "1"}}, status=True)
    api.patch("OlderPromotion", older, name, {"spec": CHANGES[case]})
    api.patch("OlderPromotion", older, name, {"status": {"phase": "Blocked"}}, status=True)
    written = api.get("OlderPromotion", older, name)
    assert written
    assert {"phase": "Blocked", "current": "1"}.items() <= written["status"].items()


@pytest.mark.parametrize(("serving", "sentence"), REFUSED.values(), ids=REFUSED)
def test_no_field_is_lost_without_a_word(api: Api, older: str, serving: Json, sentence: str) -> None:
    with refused(sentence):
        api.patch("OlderPromotion", older, "shared", {"spec": {"serving": serving}})
