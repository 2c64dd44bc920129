"""The rules of the API without an API server: the same verdicts in the same words on all cases of the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError

from finetune_crds.base import VALIDATIONS
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.schema import Schema, crd
from finetune_trainer.pod import spec_rules
from integration.schema import (
    dry_run,
    test_data,
    test_databricks,
    test_own_script,
    test_pods,
    test_promotions_accepted,
    test_promotions_refused,
    test_sinks,
    test_sweep,
    test_training,
)
from support.api import Api

Json = dict[str, Any]
_SHARED = (test_data, test_databricks, test_own_script, test_pods, test_sinks, test_sweep, test_training)
_REFUSING = (*_SHARED, test_promotions_refused)
_ACCEPTING = (*_SHARED, test_promotions_accepted)
REFUSED: dict[str, Json] = {
    f"{module.__name__.rpartition('_')[2]}: {case}": body
    for module in _REFUSING
    for case, (body, _sentence) in module.REFUSED.items()
}
ACCEPTED: dict[str, Json] = {
    f"{module.__name__.rpartition('_')[2]}: {case}": body
    for module in _ACCEPTING
    for case, body in module.ACCEPTED.items()
}
SCHEMAS: dict[str, Schema] = {
    kind.KIND: crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for kind in (FineTuneJob, ModelPromotion)
}
# What the API server writes before the sentence of a rule: some of its versions quote the type of the value, or the value.
_VALUE = re.compile(r'Invalid value: (?:"(?:[^"\\]|\\.)*": )?')
# A literal text in CEL.
_LITERAL = re.compile(r"'([^']+)'")
# The path of the object itself.
_ROOT = "<nil>"


def messages_of(schema: Schema) -> Iterator[str]:
    """The sentences of all rules of a schema; the end of a sentence that an expression builds."""
    for rule in schema.get(VALIDATIONS, ()):
        yield rule["message"] if "message" in rule else _LITERAL.findall(rule["messageExpression"])[-1]
    for part in (
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ):
        if isinstance(part, dict):
            yield from messages_of(part)


def causes_of(error: DynamicApiError) -> set[str]:
    """Why the API server refused an object: each field with a sentence."""
    causes = json.loads(error.body)["details"]["causes"]
    sentences = [(cause["field"], _VALUE.sub("", cause["message"], count=1)) for cause in causes]
    return {sentence if field == _ROOT else f"{field}: {sentence}" for field, sentence in sentences}


def violations_of(body: Json) -> set[str]:
    """What the rules say of an object, without an API server."""
    schema = SCHEMAS[body["kind"]]
    return {*spec_rules.find_violations(schema, spec_rules.set_defaults(schema, body))}


@pytest.mark.parametrize("case", REFUSED)
def test_rules_refuse_the_same_in_the_same_words(api: Api, case: str) -> None:
    body = REFUSED[case]
    with pytest.raises(DynamicApiError) as refusal:
        dry_run.create(api, body)
    causes = causes_of(refusal.value)
    messages = {*messages_of(SCHEMAS[body["kind"]])}
    # The API server evaluates no rules on a value whose type or length is wrong.
    by_rules = {
        cause
        for cause in causes
        if cause.rpartition(": ")[2] in messages or any(m in cause for m in messages)
    }
    if by_rules == causes:
        assert violations_of(body) == causes
    elif by_rules:
        assert violations_of(body) >= by_rules


@pytest.mark.parametrize("case", ACCEPTED)
def test_rules_accept_the_same_with_the_same_defaults(api: Api, case: str) -> None:
    body = ACCEPTED[case]
    assert violations_of(body) == set()
    created = dry_run.create(api, body)
    assert spec_rules.set_defaults(SCHEMAS[body["kind"]], body)["spec"] == created["spec"]
