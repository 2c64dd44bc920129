"""Counts the examples that a preparation kept and dropped, and checks that examples remain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune_trainer.examples.columns import missing_weights_error
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from finetune_crds.cleaning import RedactKind
    from finetune_trainer.prep.plan import Plan
    from finetune_trainer.prep.steps import near


@dataclass(frozen=True)
class Counts:
    """Counts of kept and dropped rows.

    examples: rows of the source.
    dropped: rows that each step dropped, by step, in the order of the steps, for example {"notNull": 3, "dedupe": 20}.
    rows, tokens: rows and tokens of each split, by split.
    sources: rows of each source of a mix, by source.
    redacted: replaced values, by kind; None if the recipe redacts nothing.
    shared: examples that share words with an evaluation set, by evaluation set.
    lengths: examples in each bin of `report.lengths`: first before maxTokens and limit, then in the table.
    near: the near duplicates; None if they were not searched for.
    weighed: rows with the field that data.columns.messageWeight names; None if it names no field.
    learned: examples with a token that the loss covers.
    samples: beginnings of some dropped examples, by step.
    """

    examples: int
    dropped: dict[str, int]
    rows: dict[str, int]
    tokens: dict[str, int]
    sources: dict[str, int] = field(default_factory=dict)
    redacted: dict[RedactKind, int] | None = None
    shared: dict[str, int] = field(default_factory=dict)
    lengths: tuple[list[int], list[int]] = ([], [])
    near: near.Clusters | None = None
    weighed: int | None = None
    learned: int = 0
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Return the warnings for the author, one sentence each."""
        return self.near.warnings if self.near else []


def require_examples(counts: Counts, plan: Plan) -> None:
    """Check that training examples remain.

    Raises:
        DataError: the source has no rows, no row has a weight or a token to train on, no rows remain, or the train or
            validation split is empty although its ratio is above 0. The test split may be empty.
    """
    remaining = sum(counts.rows.values())
    if not counts.examples:
        raise DataError("NoRows", f"{plan.source_name} has no rows: check what was written to it")
    if counts.weighed == 0:
        raise missing_weights_error(str(plan.form.messages), str(plan.form.weight))
    if not remaining:
        drops = ", ".join(f"{name} dropped {number}" for name, number in counts.dropped.items() if number)
        raise DataError(
            "NoRowsLeft",
            f"data.prepare dropped all {counts.examples} rows of {plan.source_name}: {drops}; relax its filters",
        )
    if not counts.learned:
        raise DataError(
            "NothingLearned",
            f"the loss covers only messages of the assistant, and none in the {remaining} examples of {plan.source_name} has a token to train "
            "on: check the weights of the messages, and that their roles are system, user, assistant and tool, or set objective.lossOn: All",
        )
    for name in ("train", "validation"):
        ratio = getattr(plan.prepare.split_ratios, name)
        if ratio > 0 and not counts.rows.get(name):
            raise DataError(
                "EmptySplit",
                f"the {name} split is empty, because {remaining} examples are too few for its ratio {ratio:g}: prepare more examples, or "
                f"raise data.prepare.splitRatios.{name}",
            )
