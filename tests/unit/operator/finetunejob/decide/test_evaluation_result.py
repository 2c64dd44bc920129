"""The numbers of an evaluation, as the status and the tags have them."""

from __future__ import annotations

import json

import pytest

from finetune_crds.evaluation import EvaluatedMetric, EvaluationStatus
from finetune_operator.finetunejob.decide.evaluation_result import (
    InvalidMetricsError,
    from_command,
    mlflow_metrics,
    summarize,
    version_tags,
)

READ: dict[str, tuple[str, dict[str, float]]] = {
    "whole and broken numbers": ('{"acc": 1, "f1": 0.5}', {"acc": 1.0, "f1": 0.5}),
    "below zero, and with an exponent": ('{"log_p": -1.5e3}\n', {"log_p": -1500.0}),
    "a name beside one of the training": ('{"my_eval_loss": 2}', {"my_eval_loss": 2.0}),
}


@pytest.mark.parametrize(("text", "expected"), READ.values(), ids=READ)
def test_what_a_command_wrote(text: str, expected: dict[str, float]) -> None:
    metrics = [EvaluatedMetric(name=name, value=value) for name, value in expected.items()]
    assert from_command(text, "d1") == EvaluationStatus(digest="d1", metrics=metrics)


NEEDED = (
    'write a JSON object of numbers, for example {"accuracy": 0.9}, of at most 4096 bytes, to the file that the variable METRICS_PATH '
    "names"
)
RENAME = "use at most 64 letters, digits and underscores, and do not start with a digit"
REFUSED: dict[str, tuple[str, str]] = {
    "nothing": (" \n", f"the file is empty; {NEEDED}"),
    "the end of a log": ("done", f"'done' is not JSON; {NEEDED}"),
    "cut at the limit": ('{"acc": 0.', f"'{{\"acc\": 0.' is not JSON; {NEEDED}"),
    "a list": ("[1]", f"'[1]' is not an object with numbers; {NEEDED}"),
    "an empty object": ("{}", f"'{{}}' is not an object with numbers; {NEEDED}"),
    "lists without end": ("[" * 4000, f"'{'[' * 299}... is not JSON; {NEEDED}"),
    "no number": ('{"acc": "1"}', "acc is '\"1\"', which is not a finite number"),
    "a truth": ('{"acc": true}', "acc is 'true', which is not a finite number"),
    "an object in it": ('{"acc": {"none": 1}}', "acc is '{\"none\": 1}', which is not a finite number"),
    "not a number": ('{"acc": NaN}', "acc is 'NaN', which is not a finite number"),
    "without end": ('{"acc": -Infinity}', "acc is '-Infinity', which is not a finite number"),
    "too large": ('{"acc": 1e999}', "acc is 'Infinity', which is not a finite number"),
    "a whole number that is too large": (
        f'{{"acc": {10**400}}}',
        f"acc is {repr(str(10**400))[:300]}..., which is not a finite number",
    ),
    "a name with a comma": ('{"acc,none": 1}', f"the name 'acc,none' is not allowed: {RENAME}"),
    "a digit first": ('{"1st": 1}', f"the name '1st' is not allowed: {RENAME}"),
    "a long name": (json.dumps({"a" * 65: 1}), f"the name '{'a' * 65}' is not allowed: {RENAME}"),
    "a newline after the name": ('{"acc\\n": 1}', f'the name "acc\\n" is not allowed: {RENAME}'),
    "a name of the training": (
        '{"eval_loss": 1}',
        "the name eval_loss is reserved for the trainer or the operator: use another name, for example my_eval_loss",
    ),
    "a name of the operator": (
        '{"finetune_evaluation_data": 1}',
        "the name finetune_evaluation_data is reserved for the trainer or the operator: use another name, for "
        "example my_finetune_evaluation_data",
    ),
    "too many": (
        json.dumps({f"m{number}": 1 for number in range(25)}),
        "the file has 25 metrics: write at most 24",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidMetricsError) as raised:
        from_command(text, "d1")
    assert str(raised.value) == message


BOTH = EvaluationStatus(
    rows=3,
    digest="d1",
    metrics=[
        EvaluatedMetric(name="eval_f1", value=0.1 + 0.2, base=0.25),
        EvaluatedMetric(name="eval_bleu", value=40.0),
    ],
)


def test_numbers_and_tags_of_both_models() -> None:
    assert mlflow_metrics(BOTH) == {"eval_f1": 0.1 + 0.2, "eval_bleu": 40.0, "base_eval_f1": 0.25}
    assert [*version_tags(BOTH).items()] == [
        ("eval_f1", "0.3"),
        ("eval_bleu", "40"),
        ("base_eval_f1", "0.25"),
        ("finetune_evaluation_data", "d1"),
    ]
    assert summarize(BOTH) == "eval_f1 0.3 (base model 0.25), eval_bleu 40"


def test_a_message_names_the_first_of_many_numbers() -> None:
    metrics = [EvaluatedMetric(name=f"m{number}", value=number) for number in range(10)]
    many = EvaluationStatus(digest="d1", metrics=metrics)
    assert summarize(many) == "m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6, m7 7 and 2 more"
