"""Whether training examples remain, by what a preparation counted."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.counts import Counts, require_examples
from finetune_trainer.prep.plan import build_plan
from unit.trainer.prep.recipes import recipe


def count(
    *, examples: int = 104, learned: int = 9, dropped: dict[str, int] | None = None, **rows: int
) -> Counts:
    """What a preparation counted; `rows` are those of the splits."""
    return Counts(examples=examples, dropped=dropped or {}, rows=rows, tokens=rows, learned=learned)


# Counts, and the reason and the sentence; None if examples remain.
CASES: dict[str, tuple[Counts, str | None]] = {
    "each split has examples": (count(train=8, validation=1), None),
    "a split whose ratio is 0": (count(train=8, validation=1, test=0), None),
    "a source without rows": (
        count(examples=0),
        "NoRows: /corpus has no rows: check what was written to it",
    ),
    "all rows were dropped": (
        count(dropped={"notNull": 1, "minQuality": 0, "dedupe": 2, "maxTokens": 101}),
        "NoRowsLeft: data.prepare dropped all 104 rows of /corpus: notNull dropped 1, dedupe dropped 2, maxTokens dropped 101; relax "
        "its filters",
    ),
    "nothing is learned": (
        count(train=8, validation=1, learned=0),
        "NothingLearned: the loss covers only messages of the assistant, and none in the 9 examples of /corpus has a token to train on: check the "
        "weights of the messages, and that their roles are system, user, assistant and tool, or set objective.lossOn: All",
    ),
    "no validation example": (
        count(train=1),
        "EmptySplit: the validation split is empty, because 1 examples are too few for its ratio 0.1: prepare more examples, or raise "
        "data.prepare.splitRatios.validation",
    ),
    "no training example": (
        count(validation=1),
        "EmptySplit: the train split is empty, because 1 examples are too few for its ratio 0.9: prepare more examples, or raise "
        "data.prepare.splitRatios.train",
    ),
}


@pytest.mark.parametrize(("counts", "error"), CASES.values(), ids=CASES)
def test_training_examples_remain(counts: Counts, error: str | None) -> None:
    ratios: dict[str, Any] = {"train": 0.9, "validation": 0.1, "test": 0}
    plan = build_plan(recipe(splitRatios=ratios))
    if error is None:
        require_examples(counts, plan)
        return
    with pytest.raises(DataError) as refused:
        require_examples(counts, plan)
    assert f"{refused.value.reason}: {refused.value.message}" == error


def test_a_split_that_no_ratio_requires_may_be_empty() -> None:
    plan = build_plan(recipe(splitRatios={"train": 1, "validation": 0, "test": 0}))
    require_examples(count(train=1), plan)
