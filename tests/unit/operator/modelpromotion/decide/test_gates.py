"""Gates: each kind, each verdict, with the numbers that people see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.gates import Gate
from finetune_operator.modelpromotion.decide.gates import _shorten, judge
from finetune_operator.registry.base import ModelVersion

Json = dict[str, Any]
NAN, INFINITE = float("nan"), float("inf")


def version(
    number: str, data: str | None = "d1", tags: dict[str, str] | None = None, **metrics: float
) -> ModelVersion:
    return ModelVersion(number, True, f"r{number}", tags or {}, metrics, data)


ELSEWHERE = "the run is in workspace 99, but the credentials are for workspace 1234"
HOLDER = version("1", loss=2.0, accuracy=0.8)


def metric(**bounds: float) -> Json:
    return {"type": "Metric", "metric": {"name": "loss", **bounds}}


def compared(goal: str = "Minimize", metric: str = "loss", **tolerance: Json) -> Json:
    return {"type": "Comparison", "comparison": {"metric": metric, "goal": goal, **tolerance}}


def better(**distance: float) -> Json:
    return compared(betterBy=distance)


def no_worse(**distance: float) -> Json:
    return compared(notWorseThan=distance)


# gate, candidate, holder -> verdict, value, limit, holder's value, message
Expected = tuple[str, str | None, str | None, str | None, str]
CASES: dict[str, tuple[Json, ModelVersion, ModelVersion | None, Expected]] = {
    "below the greatest": (
        metric(max=2.5),
        version("2", loss=2.25),
        None,
        ("Passed", "2.25", "<= 2.5", None, "loss is 2.25, which meets <= 2.5"),
    ),
    "the greatest itself": (
        metric(max=2.5),
        version("2", loss=2.5),
        None,
        ("Passed", "2.5", "<= 2.5", None, "loss is 2.5, which meets <= 2.5"),
    ),
    "below the least": (
        metric(min=2.5),
        version("2", loss=2.25),
        None,
        ("Failed", "2.25", ">= 2.5", None, "loss is 2.25, which does not meet >= 2.5"),
    ),
    "the least itself": (
        metric(min=2.5),
        version("2", loss=2.5),
        None,
        ("Passed", "2.5", ">= 2.5", None, "loss is 2.5, which meets >= 2.5"),
    ),
    "outside of both bounds": (
        metric(min=1, max=2),
        version("2", loss=3),
        None,
        ("Failed", "3", ">= 1 and <= 2", None, "loss is 3, which does not meet >= 1 and <= 2"),
    ),
    "not a number": (
        metric(max=2.5),
        version("2", loss=NAN),
        None,
        ("Failed", "nan", "<= 2.5", None, "loss is nan, which does not meet <= 2.5"),
    ),
    "less than nothing": (
        metric(max=2.5),
        version("2", loss=-INFINITE),
        None,
        ("Failed", "-inf", "<= 2.5", None, "loss is -inf, which does not meet <= 2.5"),
    ),
    "a tag in the place of a metric": (
        metric(max=2.5),
        version("2", tags={"loss": "2.1"}),
        None,
        ("Passed", "2.1", "<= 2.5", None, "loss is 2.1, which meets <= 2.5"),
    ),
    "a tag comes before the run's metric": (
        metric(max=2.5),
        version("2", tags={"loss": "2.75"}, loss=2.1),
        None,
        ("Failed", "2.75", "<= 2.5", None, "loss is 2.75, which does not meet <= 2.5"),
    ),
    "a tag that is no number": (
        metric(max=2.5),
        version("2", tags={"loss": "low"}),
        None,
        ("Inconclusive", None, "<= 2.5", None, "tag loss of version 2 is 'low', which is not a number"),
    ),
    "no such number": (
        metric(max=2.5),
        version("2"),
        None,
        (
            "Inconclusive",
            None,
            "<= 2.5",
            None,
            "version 2 has no loss: loss is neither a tag of the version nor a metric of its run",
        ),
    ),
    "no number, and a run that is not read": (
        metric(max=2.5),
        replace(version("2", None), unread=ELSEWHERE),
        None,
        (
            "Inconclusive",
            None,
            "<= 2.5",
            None,
            "version 2 has no tag loss, and the metrics of its run cannot be read (the run is in workspace 99, but "
            "the credentials are for workspace 1234): set the tag loss of the version",
        ),
    ),
    "tags in the place of a run that is not read": (
        no_worse(relative=0.5),
        replace(version("2", "d1", {"loss": "2.5"}), unread=ELSEWHERE),
        HOLDER,
        (
            "Passed",
            "2.5",
            "<= 3",
            "2",
            "loss is 2.5, which meets <= 3, since version 1, which has the alias, has 2",
        ),
    ),
    "compared, and a run that is not read": (
        no_worse(relative=0.5),
        replace(version("2", None, {"loss": "2.5"}), unread=ELSEWHERE),
        HOLDER,
        (
            "Inconclusive",
            "2.5",
            None,
            "2",
            "version 2 does not record its evaluation data, and its run cannot be read (the run is in workspace "
            "99, but the credentials are for workspace 1234): set the tag finetune_eval_data of the version",
        ),
    ),
    "a tag as it must be": (
        {"type": "Tag", "tag": {"name": "reviewed", "equals": "yes"}},
        version("2", tags={"reviewed": "yes"}),
        None,
        ("Passed", "yes", "= yes", None, "tag reviewed is 'yes'"),
    ),
    "another tag": (
        {"type": "Tag", "tag": {"name": "reviewed", "equals": "yes"}},
        version("2", tags={"reviewed": "no"}),
        None,
        ("Failed", "no", "= yes", None, "tag reviewed is 'no', but must be 'yes'"),
    ),
    "no tag yet": (
        {"type": "Tag", "tag": {"name": "reviewed", "equals": "yes"}},
        version("2"),
        None,
        ("Inconclusive", None, "= yes", None, "version 2 has no tag reviewed, which must be 'yes'"),
    ),
    "better by enough": (
        better(absolute=0.25),
        version("2", loss=1.75),
        HOLDER,
        (
            "Passed",
            "1.75",
            "<= 1.75",
            "2",
            "loss is 1.75, which meets <= 1.75, since version 1, which has the alias, has 2",
        ),
    ),
    "better, and not by enough": (
        better(relative=0.5),
        version("2", loss=1.5),
        HOLDER,
        (
            "Failed",
            "1.5",
            "<= 1",
            "2",
            "loss is 1.5, which does not meet <= 1, since version 1, which has the alias, has 2",
        ),
    ),
    "a little worse": (
        no_worse(relative=0.1),
        version("2", loss=2.2),
        HOLDER,
        (
            "Passed",
            "2.2",
            "<= 2.2",
            "2",
            "loss is 2.2, which meets <= 2.2, since version 1, which has the alias, has 2",
        ),
    ),
    "more is better": (
        compared("Maximize", "accuracy", betterBy={"absolute": 0.1}),
        version("2", accuracy=0.9),
        HOLDER,
        (
            "Passed",
            "0.9",
            ">= 0.9",
            "0.8",
            "accuracy is 0.9, which meets >= 0.9, since version 1, which has the alias, has 0.8",
        ),
    ),
    "more is better, and this is less": (
        compared("Maximize", "accuracy", notWorseThan={"absolute": 0.1}),
        version("2", accuracy=0.6),
        HOLDER,
        (
            "Failed",
            "0.6",
            ">= 0.7",
            "0.8",
            "accuracy is 0.6, which does not meet >= 0.7, since version 1, which has the alias, has 0.8",
        ),
    ),
    "no version to compare with": (
        better(absolute=0.1),
        version("2", loss=9.0),
        None,
        ("Passed", "9", None, None, "loss is 9, and no version has the alias to compare with"),
    ),
    "not a number to compare": (
        better(absolute=0.1),
        version("2", loss=NAN),
        HOLDER,
        ("Failed", "nan", None, None, "loss of version 2 is nan, which cannot be compared"),
    ),
    "a holder that is not a number": (
        better(absolute=0.1),
        version("2", loss=1.0),
        version("1", loss=NAN),
        ("Inconclusive", "1", None, "nan", "loss of version 1, which has the alias, is nan"),
    ),
    "other data": (
        better(absolute=0.1),
        version("2", data="d2", loss=1.0),
        HOLDER,
        (
            "Inconclusive",
            "1",
            None,
            "2",
            "version 2 (d2) and version 1, which has the alias (d1), were evaluated on different data or with "
            "different objectives: evaluate both versions on the same data with the same objectives",
        ),
    ),
    "data without a digest": (
        better(absolute=0.1),
        version("2", loss=1.0),
        version("1", data=None, loss=2.0),
        (
            "Inconclusive",
            "1",
            None,
            "2",
            "version 1 does not record its evaluation data: set the tag finetune_eval_data of the version or of its run",
        ),
    ),
    "a holder without the number": (
        better(absolute=0.1),
        version("2", loss=1.0),
        version("1"),
        (
            "Inconclusive",
            "1",
            None,
            None,
            "version 1 has no loss: loss is neither a tag of the version nor a metric of its run",
        ),
    ),
}


def evaluated(number: str, digest: str, **numbers: str) -> ModelVersion:
    """A version whose numbers are from spec.evaluation, and which training evaluated on d1."""
    return version(number, tags={**numbers, "finetune_evaluation_data": digest}, loss=2.0)


ACCURACY = compared("Maximize", "eval_accuracy", betterBy={"absolute": 0})
EVALUATIONS: dict[str, tuple[Json, ModelVersion, ModelVersion, Expected]] = {
    "the same rows, whatever the training was evaluated on": (
        ACCURACY,
        evaluated("2", "e1", eval_accuracy="0.9"),
        replace(evaluated("1", "e1", eval_accuracy="0.8"), evaluated_on="d2"),
        (
            "Passed",
            "0.9",
            ">= 0.8",
            "0.8",
            "eval_accuracy is 0.9, which meets >= 0.8, since version 1, which has the alias, has 0.8",
        ),
    ),
    "other rows": (
        ACCURACY,
        evaluated("2", "e2", eval_accuracy="0.9"),
        evaluated("1", "e1", eval_accuracy="0.8"),
        (
            "Inconclusive",
            "0.9",
            None,
            "0.8",
            "version 2 (e2) and version 1, which has the alias (e1), were evaluated on different data or with "
            "different settings: evaluate both versions on the same data with the same settings",
        ),
    ),
    "a loss of the training is compared on what that was evaluated on": (
        compared("Minimize", "eval_loss", betterBy={"absolute": 0}),
        evaluated("2", "e2", eval_loss="1"),
        evaluated("1", "e1", eval_loss="2"),
        (
            "Passed",
            "1",
            "<= 2",
            "2",
            "eval_loss is 1, which meets <= 2, since version 1, which has the alias, has 2",
        ),
    ),
    "a number of the run that no evaluation wrote": (
        better(absolute=0),
        evaluated("2", "e2"),
        evaluated("1", "e1"),
        (
            "Passed",
            "2",
            "<= 2",
            "2",
            "loss is 2, which meets <= 2, since version 1, which has the alias, has 2",
        ),
    ),
    "a holder whose number is from elsewhere": (
        ACCURACY,
        evaluated("2", "e1", eval_accuracy="0.9"),
        version("1", eval_accuracy=0.8),
        (
            "Inconclusive",
            "0.9",
            None,
            "0.8",
            (
                "eval_accuracy of version 2 comes from spec.evaluation, but eval_accuracy of version 1 comes from "
                "training: evaluate both versions with spec.evaluation"
            ),
        ),
    ),
    "a candidate whose number is from elsewhere": (
        ACCURACY,
        version("2", eval_accuracy=0.9),
        evaluated("1", "e1", eval_accuracy="0.8"),
        (
            "Inconclusive",
            "0.9",
            None,
            "0.8",
            (
                "eval_accuracy of version 1 comes from spec.evaluation, but eval_accuracy of version 2 comes from "
                "training: evaluate both versions with spec.evaluation"
            ),
        ),
    ),
}
STARTED_FROM_1 = {"finetune_base_version": "1"}
NO_LOSS = compared("Minimize", "eval_loss", betterBy={"absolute": 0.1})
BASES: dict[str, tuple[Json, ModelVersion, ModelVersion, Expected]] = {
    "the holder on the rows of a training that started from it": (
        NO_LOSS,
        version("2", "d2", {**STARTED_FROM_1, "eval_loss": "1.5"}, base_eval_loss=2.5),
        version("1", "d1", {"eval_loss": "1"}),
        (
            "Passed",
            "1.5",
            "<= 2.4",
            "2.5",
            "eval_loss is 1.5, which meets <= 2.4, since version 1, which has the alias, has 2.5 on the same rows",
        ),
    ),
    "the holder on the rows of an evaluation, which has no number of its own": (
        ACCURACY,
        evaluated("2", "e2", **STARTED_FROM_1, eval_accuracy="0.7", base_eval_accuracy="0.8"),
        version("1", None),
        (
            "Failed",
            "0.7",
            ">= 0.8",
            "0.8",
            "eval_accuracy is 0.7, which does not meet >= 0.8, since version 1, which has the alias, has 0.8 on the same rows",
        ),
    ),
    "a holder with a number on the same rows": (
        NO_LOSS,
        version("2", "d1", {**STARTED_FROM_1, "eval_loss": "1.5"}, base_eval_loss=2.5),
        version("1", "d1", {"eval_loss": "2"}),
        (
            "Passed",
            "1.5",
            "<= 1.9",
            "2",
            "eval_loss is 1.5, which meets <= 1.9, since version 1, which has the alias, has 2",
        ),
    ),
    **{
        f"other rows, and {what}": (
            NO_LOSS,
            version("2", "d2", {**tags, "eval_loss": "1.5"}, base_eval_loss=base),
            version("1", "d1", {"eval_loss": "2"}),
            (
                "Inconclusive",
                "1.5",
                None,
                "2",
                "version 2 (d2) and version 1, which has the alias (d1), were evaluated on different data or with different "
                "objectives: evaluate both versions on the same data with the same objectives",
            ),
        )
        for what, tags, base in (
            ("another base", {"finetune_base_version": "11"}, 2.5),
            ("no base", {}, 2.5),
            ("a base without a number", STARTED_FROM_1, NAN),
        )
    },
}
CASES |= EVALUATIONS | BASES


@pytest.mark.parametrize(("gate", "candidate", "holder", "expected"), CASES.values(), ids=CASES)
def test_judge(gate: Json, candidate: ModelVersion, holder: ModelVersion | None, expected: Expected) -> None:
    [verdict] = judge([Gate.model_validate({"name": "g", **gate})], candidate, holder)
    assert (verdict.verdict, verdict.value, verdict.limit, verdict.holder, verdict.message) == expected


def test_a_gate_of_a_kind_that_has_no_verdict_lets_nothing_pass() -> None:
    unknown = Gate.model_construct(name="new", metric=None, tag=None, comparison=None)
    with pytest.raises(ValueError, match="gate new has an unknown kind"):
        judge([unknown], version("2", loss=1.0), HOLDER)


@pytest.mark.parametrize(("length", "ending"), [(199, ""), (200, ""), (201, "...")])
def test_a_long_value_is_cut(length: int, ending: str) -> None:
    assert _shorten("a" * length) == "a" * min(length, 200) + ending
