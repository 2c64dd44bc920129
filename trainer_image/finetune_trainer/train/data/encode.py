"""Turns rows into the examples of a run, and counts the rows that it drops."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.examples.column_values import parse_labels, parse_margins
from finetune_trainer.examples.columns import find_table_columns
from finetune_trainer.examples.documents import Documents
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.examples.token_columns import Document

WEIGHED = "with weights"
"""The counter of rows with the field that data.columns.messageWeight names."""
# The counters of `Encoder.counts` that are metrics, each with the suffix of its metric.
_METRIC_SUFFIXES = {
    "read": "rows_read",
    "kept": "rows_kept",
    "too long": "rows_too_long",
    "truncated": "rows_truncated",
    "tokens cut": "tokens_cut",
    "without an answer": "rows_without_answer",
    "without a difference": "rows_without_difference",
}


@dataclass(frozen=True)
class Encoded:
    """One tokenized example.

    tokens: token ids of its documents, concatenated, int32 [tokens].
    loss_mask: whether the token is a target of the loss, bool [tokens].
    lengths: tokens in each document, int32 [documents]: one document, or the chosen and the rejected one.
    label: for unpaired preferences, whether the answer is good.
    margin: for pairs, by how much the chosen answer is better, if the data has it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    label: bool | None = None
    margin: float | None = None

    @classmethod
    def of(cls, *documents: Document, label: bool | None = None, margin: float | None = None) -> Encoded:
        """Make an example from documents with loss masks."""
        return cls(
            np.array([token for document in documents for token in document.tokens], np.int32),
            np.array([target for document in documents for target in document.loss_mask or ()], np.bool_),
            np.array([len(document.tokens) for document in documents], np.int32),
            label,
            margin,
        )

    @property
    def fingerprint(self) -> bytes:
        """Hash of the whole example, 16 bytes."""
        parts = [part.tobytes() for part in (self.lengths, self.tokens, self.loss_mask)]
        parts += [] if self.label is None else [bytes([self.label])]
        parts += [] if self.margin is None else [np.float32(self.margin).tobytes()]
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@dataclass
class Encoder:
    """Makes examples from rows, and counts the rows that are read, kept, truncated and dropped.

    max_length, truncation: training.maxLength and training.truncation.
    counts: rows of the last split by counter, for example {"read": 100, "kept": 98, "too long": 2}, see _METRIC_SUFFIXES and WEIGHED;
        "tokens cut" counts tokens.
    """

    documents: Documents
    max_length: int
    truncation: str
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """Make the encoder of a recipe.

        Raises:
            RecipeRefusedError: examples are conversations, and the tokenizer has no chat template.
        """
        day = recipe.job.created
        documents = Documents.of_recipe(tokenizer, find_table_columns(recipe.data), recipe.objective, day)
        if documents.columns.messages is not None:
            documents.check_template("data.columns.messages", recipe.model.base)
        return cls(documents, recipe.training.max_length, recipe.training.truncation)

    def encode(self, rows: dict[str, list[Any]]) -> Iterator[Encoded]:
        """Yield the examples of a batch of columns that `select_examples` keeps.

        Raises:
            DataError: as in `select_examples`; or a value does not have the type of its column.
            RecipeRefusedError: an answer is a list of messages, and the tokenizer has no chat template.
        """
        if self.documents.columns.message_weight is not None:
            self.counts[WEIGHED] += self.documents.count_weighted(rows)
        columns = self.documents.columns
        return self.select_examples(
            self.documents.of(rows), parse_labels(rows, columns), parse_margins(rows, columns)
        )

    def select_examples(
        self,
        rows: Iterable[tuple[Document, ...]],
        row_labels: Sequence[bool | None],
        row_margins: Sequence[float | None],
    ) -> Iterator[Encoded]:
        """Yield an example for each row that is kept; training.truncation decides about rows that are too long.

        Examples without a target, and pairs of equal documents, are dropped and counted.

        Args:
            rows: the documents of each row.
            row_labels: the label of each row, from `parse_labels`.
            row_margins: the margin of each row, from `parse_margins`.

        Raises:
            DataError: a row is too long and training.truncation is Fail, or it is unknown which tokens are answers.
        """
        for row, label, margin in zip(rows, row_labels, row_margins, strict=True):
            self.counts["read"] += 1
            documents = self._apply_truncation(row)
            if documents is None:
                continue
            if not all(self._has_target(document) for document in documents):
                self.counts["without an answer"] += 1
            elif len(documents) == 2 and documents[0].tokens == documents[1].tokens:
                self.counts["without a difference"] += 1
            else:
                self.counts["kept"] += 1
                yield Encoded.of(*documents, label=label, margin=margin)

    def _has_target(self, document: Document) -> bool:
        if document.loss_mask is None:
            raise DataError("ChatTemplate", self.documents.unknown_answers)
        # No token predicts the first token.
        return any(document.loss_mask[1:])

    def summary(self) -> str:
        """Return the counts of the last split as text."""
        return ", ".join(f"{count:,} {counter}" for counter, count in self.counts.items())

    def suggest_remedy(self) -> str:
        """Return what to do if all rows of the last split were dropped."""
        counts, columns = self.counts, self.documents.columns
        remedies = []
        if counts["too long"] or counts["truncated"]:
            remedies.append(f"raise training.maxLength above {self.max_length}")
        # A truncated row may have lost its answer or its difference when it was cut. If more rows lack an
        # answer (or a difference) than were truncated, some rows lack it in the data.
        if counts["without an answer"] > counts["truncated"]:
            what = "texts" if columns.text is not None else "answers"
            remedies.append(f"put {what} into {', '.join(columns.column_names)} of the rows")
        if counts["without a difference"] > counts["truncated"]:
            remedies.append(f"put different answers into {columns.chosen} and {columns.rejected} of the rows")
        return ", and ".join(remedies)

    def metrics(self, split_name: str) -> dict[str, float]:
        """Return the counts of the last split by metric, such as train_rows_kept."""
        return {
            f"{split_name}_{suffix}": float(self.counts[counter])
            for counter, suffix in _METRIC_SUFFIXES.items()
        }

    def _apply_truncation(self, documents: tuple[Document, ...]) -> tuple[Document, ...] | None:
        """Apply training.truncation; None: the example is dropped."""
        longest = max(len(document.tokens) for document in documents)
        if longest <= self.max_length:
            return documents
        if self.truncation == "Fail":
            raise DataError(
                "ExampleTooLong",
                f"an example has {longest} tokens, above training.maxLength {self.max_length}: raise training.maxLength, or set "
                "training.truncation to Drop or Truncate",
            )
        if self.truncation == "Drop":
            self.counts["too long"] += 1
            return None
        self.counts["truncated"] += 1
        self.counts["tokens cut"] += sum(
            max(0, len(document.tokens) - self.max_length) for document in documents
        )
        return tuple(document.first(self.max_length) for document in documents)
