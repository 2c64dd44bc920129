"""The rows of an evaluation: the same rows for every model, in a fixed order."""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import dataclass, replace
from datetime import date
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_crds.evaluation import GENERATED, Evaluation
from finetune_trainer.evaluate import questions
from finetune_trainer.examples.column_values import count_rows, parse_margins
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.data.encode import Encoded, Encoder
from finetune_trainer.train.data.read import read
from finetune_trainer.train.data.row_places import name_refused_row
from finetune_trainer.train.model.network import task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.evaluation import Metric
    from finetune_crds.recipe import Recipe
    from finetune_trainer.evaluate.questions import Question
    from finetune_trainer.examples.documents import Documents
    from finetune_trainer.examples.token_columns import Document

# Any day will do, see `Row.fingerprint`.
_FIXED_DAY = date(2000, 1, 1)
# Part of the digest. Increase it whenever answers are generated in another way.
_DECODING_VERSION = 1
_DIGEST_CHARS = 12


@dataclass(frozen=True)
class Row:
    """A row: its tokens with the targets of the loss, and its question, if it has one (see `questions.build_questions`).

    fingerprint: a hash of its tokens and targets, with a fixed date if the chat template writes the date, so that jobs of different
        days choose the same rows and have comparable numbers.
    """

    example: Encoded
    question: Question | None
    fingerprint: bytes


@dataclass(frozen=True)
class Rows:
    """The rows of an evaluation, in the order of their fingerprints; all of them are in memory.

    digest: 12 hexadecimal digits of a SHA-256 of the rows' fingerprints and of the settings that generate answers.
    summary: how many rows were read, kept and dropped, and how many of the kept rows have no question, as text.
    """

    rows: list[Row]
    digest: str
    summary: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def split(self) -> Split:
        """The tokens, as the trainer's losses take them."""
        examples = [row.example for row in self.rows]
        lengths = np.concatenate([example.lengths for example in examples])
        margins = [example.margin for example in examples if example.margin is not None]
        return Split(
            np.concatenate([example.tokens for example in examples]),
            np.concatenate([example.loss_mask for example in examples]),
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            documents=len(lengths) // len(examples),
            margins=np.array(margins, np.float32) if margins else None,
        )

    @property
    def questions(self) -> list[Question]:
        """The questions of the rows that have one."""
        return [row.question for row in self.rows if row.question is not None]


def load(recipe: Recipe, spec: Evaluation, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Read and tokenize the rows of an evaluation, without the rows that training.truncation drops.

    Args:
        recipe: a recipe with data.splits and data.columns.
        spec: the split, and the maximum number of rows: the rows with the smallest fingerprints are used.
        tokenizer: the tokenizer of the registered version.

    Raises:
        DataError: data is missing or corrupt, the split has no rows, or a metric compares answers and no row has an answer in text.
        RecipeRefusedError: a metric compares answers, but the rows have no answers or may have bad answers.
    """
    encoder = Encoder.of(recipe, tokenizer)
    _check_answers(recipe, encoder, spec)
    all_rows = _read_rows(recipe, spec, encoder)
    key = attrgetter("fingerprint")
    chosen_rows = (
        sorted(all_rows, key=key) if spec.limit is None else heapq.nsmallest(spec.limit, all_rows, key=key)
    )
    if not chosen_rows:
        raise _build_empty_split_error(recipe, spec, encoder)
    generated_metrics = _list_generated_metrics(recipe, spec)
    if generated_metrics and all(row.question is None for row in chosen_rows):
        raise DataError(
            "NoAnswers",
            f"no row of the split {spec.split.lower()} has an answer in text ({encoder.summary()}), but "
            f"evaluation.metrics {', '.join(generated_metrics)} compare answers: set Loss and Perplexity, or evaluate rows where "
            "the assistant answers with text",
        )
    return Rows(chosen_rows, _compute_digest(chosen_rows, spec), encoder.summary())


def _check_answers(recipe: Recipe, encoder: Encoder, spec: Evaluation) -> None:
    """Check that the rows have no labels, and have answers if a metric compares answers; raises as `load`."""
    columns = encoder.documents.columns
    if columns.label is not None:
        raise RecipeRefusedError(
            "the built-in evaluation does not support data.columns.type Unpaired, whose answers can be bad: remove evaluation, or set "
            "evaluation.command"
        )
    generated_metrics = _list_generated_metrics(recipe, spec)
    if columns.text is not None and generated_metrics:
        raise RecipeRefusedError(
            f"evaluation.metrics {', '.join(generated_metrics)} compare answers, but the rows are texts without answers: set Loss "
            "and Perplexity, or columns with a prompt and its answer"
        )


def _list_generated_metrics(recipe: Recipe, spec: Evaluation) -> list[Metric]:
    if task.of_recipe(recipe) == "RewardModel":
        return []
    return [metric for metric in spec.selected_metrics if metric in GENERATED]


def _read_rows(recipe: Recipe, spec: Evaluation, encoder: Encoder) -> Iterator[Row]:
    """Yield the rows of the split that are kept; the encoder counts all rows."""
    splits, documents = recipe.data.splits, encoder.documents
    assert splits is not None  # noqa: S101 - load_recipe() refuses a recipe without splits
    columns = documents.columns
    is_reward_model = task.of_recipe(recipe) == "RewardModel"
    # Texts have no questions, and only generated answers need questions.
    is_generated = not is_reward_model and bool(spec.generations or _list_generated_metrics(recipe, spec))
    asks = columns.text is None and is_generated
    # A reward model compares both documents of a preference; other models are evaluated on the first: the prompt with the chosen answer.
    document_count = 2 if is_reward_model else 1
    with name_refused_row(splits, spec.split.lower(), encoder.counts):
        for batch in read(splits, spec.split.lower(), columns.column_names, may_be_null=[columns.tools]):
            row_parts = zip(
                documents.of(batch),
                parse_margins(batch, columns),
                _render_on_fixed_day(documents, batch),
                _read_questions(documents, batch, asks=asks),
                strict=True,
            )
            for row, margin, fixed_day_row, question in row_parts:
                # One row, without a label. A row that is dropped has no example.
                for example in encoder.select_examples([row[:document_count]], [None], [margin]):
                    if asks and question is None:
                        encoder.counts["without a question"] += 1
                    hashed = example
                    if fixed_day_row is not None:
                        hashed = Encoded.of(*fixed_day_row[:document_count], margin=margin)
                    yield Row(example, question, hashed.fingerprint)


def _render_on_fixed_day(
    documents: Documents, batch: Mapping[str, list[Any]]
) -> Iterator[tuple[Document, ...] | None]:
    """Yield the documents of each row of a batch, rendered with the fixed date; None if the date changes nothing."""
    if not documents.depend_on_day:
        return repeat(None, count_rows(batch))
    return replace(documents, day=_FIXED_DAY).of(batch)


def _read_questions(
    documents: Documents, batch: Mapping[str, list[Any]], *, asks: bool
) -> Iterator[Question | None]:
    """Yield the question of each row of a batch if `asks` is set; otherwise None for each row."""
    if asks:
        return questions.build_questions(documents, batch)
    return repeat(None, count_rows(batch))


def _build_empty_split_error(recipe: Recipe, spec: Evaluation, encoder: Encoder) -> DataError:
    splits, name = recipe.data.splits, spec.split.lower()
    assert splits is not None  # noqa: S101 - load_recipe() refuses a recipe without splits
    other_split = "Validation" if spec.split == "Test" else "Test"
    if encoder.counts["read"]:
        return DataError(
            "EmptySplit",
            f"no row of the split {name} is left ({encoder.summary()}): {encoder.suggest_remedy()}",
        )
    where = splits.path or getattr(splits, name)
    if where is None:
        return DataError(
            "EmptySplit", f"data.splits.{name} is not set: set it, or set evaluation.split: {other_split}"
        )
    return DataError(
        "EmptySplit",
        f"{where} has no rows of the split {name}, which the evaluation reads: prepare the data with "
        f"data.prepare.splitRatios.{name} above 0, or set evaluation.split: {other_split}",
    )


def _compute_digest(rows: list[Row], spec: Evaluation) -> str:
    hashed = hashlib.sha256(json.dumps([_DECODING_VERSION, spec.max_new_tokens]).encode())
    for row in rows:
        hashed.update(row.fingerprint)
    return hashed.hexdigest()[:_DIGEST_CHARS]
