"""Rules that are stricter than those of an earlier version: an object that exists is not held to them, whatever else of it changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from fixtures.operator_processes.operators import new_namespace
from integration.older_kind import OlderKind, is_taken
from support.api import Api
from support.refusals import refused
from support.waiting import wait_for

Json = dict[str, Any]

# What an earlier version took, and how the rule begins that refuses it now.
STRICTER: dict[str, tuple[Json, str]] = {
    "parameters of the built-in loop": (
        job(trainer={"parameters": {"a": "1"}}),
        "trainer.parameters can be set only when trainer.command is set",
    ),
    "no parameters of the built-in evaluation": (
        job(evaluation={"parameters": {}}),
        "parameters can be set only when command is set",
    ),
    "a bucket without a folder": (
        job(
            data={
                "source": {"type": "Parquet", "path": "/data/corpus"},
                "columns": {"type": "Text"},
                "prepare": {"output": "s3://bucket"},
            }
        ),
        "output must be s3://bucket/folder",
    ),
    "a pod template that is in pods by now": (
        job(podTemplate={"spec": {"containers": [{"name": "trainer", "tty": True}]}}),
        "replaced by pods.train.template",
    ),
    "variables that are in pods by now": (
        job(env=[{"name": "A", "value": "b"}]),
        "replaced by pods.all.env",
    ),
    "a tokenizer in a store that a run has no credentials for": (
        job(
            model={"base": "gs://bucket/base"},
            data={
                "source": {"type": "Delta", "path": "s3://bucket/corpus"},
                "columns": {"type": "Text"},
                "prepare": {
                    "output": "s3://bucket/splits",
                    "spark": {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}},
                },
            },
        ),
        "model.base must not be in an object store when data.prepare.spark.mode is Databricks",
    ),
}
CHANGES: dict[str, Json] = {
    "suspend": {"suspend": True},
    "template": {"pods": {"train": {"template": {"spec": {"nodeSelector": {"pool": "b"}}}}}},
    "queueName": {"runPolicy": {"queueName": "other"}},
    "the image": {"pods": {"train": {"image": "me/mine:2"}}},
}
INNER: dict[str, Json] = {
    "no parameters of the built-in evaluation": {
        "pods": {"evaluate": {"template": {"spec": {"priority": 1}}}}
    },
    "a bucket without a folder": {"pods": {"prepare": {"template": {"spec": {"priority": 1}}}}},
}


OLDER = OlderKind("OlderJob", "finetune.dev_finetunejobs.yaml")


def of_older(body: Json, namespace: str = "") -> Json:
    """A FineTuneJob as an object of the test's own kind."""
    return {**body, "kind": OLDER.kind, "metadata": {**body["metadata"], "namespace": namespace}}


def without_rules(schema: Any) -> Any:
    """A schema as it was before the stricter rules."""
    if isinstance(schema, list):
        return [without_rules(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    older_schema = {name: without_rules(part) for name, part in schema.items()}
    rules = older_schema.get("x-kubernetes-validations")
    if isinstance(rules, list):
        begins = tuple(sentence for _, sentence in STRICTER.values())
        older_schema["x-kubernetes-validations"] = [
            rule for rule in rules if not rule.get("message", "").startswith(begins)
        ]
    return older_schema


@pytest.fixture(scope="module")
def older(api: Api) -> str:
    """A namespace with a job for each rule, all of them older than the rules."""
    namespace = new_namespace(api)
    OLDER.create(api, without_rules)
    for number, (body, _) in enumerate(STRICTER.values()):
        older_job = of_older(body | {"metadata": {"name": name_of(number)}}, namespace)
        wait_for("the job is taken", partial(is_taken, api, older_job))
    OLDER.add_rules(api)
    last = of_older([*STRICTER.values()][-1][0] | {"metadata": {"name": "new"}}, namespace)
    wait_for("the rules count", lambda: not is_taken(api, last, dry_run=True))
    return namespace


def name_of(number: int) -> str:
    return f"job-{number}"


@pytest.mark.parametrize("case", STRICTER)
def test_a_new_job_is_refused(api: Api, older: str, case: str) -> None:
    body, sentence = STRICTER[case]
    with refused(sentence):
        api.create(of_older(body | {"metadata": {"name": "new"}}, older))


@pytest.mark.parametrize("case", STRICTER)
def test_a_job_that_exists_can_be_changed(api: Api, older: str, case: str) -> None:
    name = name_of([*STRICTER].index(case))
    for change in [*CHANGES.values(), INNER.get(case, {"suspend": False})]:
        api.patch("OlderJob", older, name, {"spec": change})
