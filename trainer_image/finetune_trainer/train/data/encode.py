"""Encodes rows as token ids with a loss mask."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from finetune_crds.data import Columns
from finetune_trainer import chat_templates, turns
from finetune_trainer.outcome import DataError, RecipeRefusedError
from finetune_trainer.train.runtime.recipe import example_columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe

# Counters, and the suffix of the metric of each.
_METRIC_SUFFIXES = {
    "read": "rows_read",
    "kept": "rows_kept",
    "too long": "rows_too_long",
    "truncated": "rows_truncated",
    "tokens cut": "tokens_cut",
    "without an answer": "rows_without_answer",
    "without a difference": "rows_without_difference",
}


class Document(NamedTuple):
    """Token ids of one independent text, and whether each is a target of the loss."""

    tokens: list[int]
    loss_mask: list[bool]

    def first(self, count: int) -> Document:
        """Return the document truncated to `count` tokens."""
        return Document(self.tokens[:count], self.loss_mask[:count])


@dataclass(frozen=True)
class Encoded:
    """One tokenised example.

    tokens: token ids of its documents, concatenated, int32 [tokens].
    loss_mask: whether the token is a target of the loss, bool [tokens].
    lengths: tokens in each document, int32 [documents]: one document, or the chosen and the rejected one.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, *documents: Document) -> Encoded:
        """Make an example of some documents."""
        return cls(
            np.array([token for document in documents for token in document.tokens], np.int32),
            np.array([target for document in documents for target in document.loss_mask], np.bool_),
            np.array([len(document.tokens) for document in documents], np.int32),
        )

    @property
    def fingerprint(self) -> bytes:
        """Hash of the whole example, 16 bytes."""
        parts = (self.lengths, self.tokens, self.loss_mask)
        return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()


@dataclass
class Encoder:
    """Encodes rows, and counts which are kept, truncated and dropped."""

    tokenizer: PreTrainedTokenizerBase
    columns: Columns
    loss_on_answer: bool
    max_length: int
    overlong: str
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """Make the encoder of a recipe.

        Raises:
            RecipeRefusedError: examples are conversations, and the tokenizer has no chat template.
        """
        encoder = cls(
            tokenizer=tokenizer,
            columns=example_columns(recipe.data),
            loss_on_answer=recipe.objective.loss_on != "All",
            max_length=recipe.training.max_length,
            overlong=recipe.training.overlong,
        )
        if encoder.columns.messages is not None:
            encoder.check_template("data.columns.messages", recipe.model.base)
        return encoder

    @property
    def documents(self) -> int:
        """Documents per example: two for preferences."""
        return 1 if self.columns.chosen is None else 2

    def check_template(self, what: str, base: str) -> None:
        """Check that the tokenizer has a chat template.

        Raises:
            RecipeRefusedError: it has none.
        """
        if self.tokenizer.chat_template is None:
            raise RecipeRefusedError(
                f"{what} needs a chat template, and the tokenizer of {base} has none: set model.chatTemplate"
            )

    def encode(self, rows: dict[str, list[Any]]) -> Iterator[Encoded]:
        """Yield the examples of a batch of columns; training.overlong decides about overlong ones.

        Examples without a target, and pairs of equal documents, are dropped and counted.

        Raises:
            DataError: a row does not have the type of its column, or is overlong and training.overlong is Fail.
            RecipeRefusedError: an answer is a list of messages, and the tokenizer has no chat template.
        """
        for whole in self._encode_whole(rows):
            self.counts["read"] += 1
            documents = self._fit(whole)
            if documents is None:
                continue
            if not all(any(document.loss_mask[1:]) for document in documents):
                self.counts["without an answer"] += 1
            elif len(documents) == 2 and documents[0].tokens == documents[1].tokens:
                self.counts["without a difference"] += 1
            else:
                self.counts["kept"] += 1
                yield Encoded.of(*documents)

    def summary(self) -> str:
        """Return the counts of the last split as text."""
        return ", ".join(f"{number:,} {what}" for what, number in self.counts.items())

    def metrics(self, split_name: str) -> dict[str, float]:
        """Return the counts of the last split by metric, such as train_rows_kept."""
        return {f"{split_name}_{name}": float(self.counts[what]) for what, name in _METRIC_SUFFIXES.items()}

    def _encode_whole(self, rows: dict[str, list[Any]]) -> Iterator[tuple[Document, ...]]:
        columns = self.columns
        if columns.messages is not None:
            return self._conversations(rows, columns.messages)
        if columns.text is not None:
            return self._texts(_texts(rows, columns.text))
        assert columns.prompt is not None  # noqa: S101 - the recipe was refused otherwise
        if columns.response is not None:
            return self._answers(_texts(rows, columns.prompt), _texts(rows, columns.response))
        assert columns.chosen is not None  # noqa: S101 - the recipe was refused otherwise
        assert columns.rejected is not None  # noqa: S101
        return self._preferences(rows[columns.prompt], rows[columns.chosen], rows[columns.rejected])

    def _conversations(self, rows: dict[str, list[Any]], column: str) -> Iterator[tuple[Document, ...]]:
        given = rows[self.columns.tools] if self.columns.tools else [None] * len(rows[column])
        for value, tools in zip(rows[column], given, strict=True):
            messages = _messages(value, column)
            yield (
                self._conversation(messages, 0, self.loss_on_answer, _tools(tools, str(self.columns.tools))),
            )

    def _texts(self, texts: list[str]) -> Iterator[tuple[Document, ...]]:
        for ids in self.tokenizer(texts)["input_ids"]:
            tokens = [*self._without_end(ids), self.tokenizer.eos_token_id]
            yield (Document(tokens, [True] * len(tokens)),)

    def _answers(self, prompts: list[str], responses: list[str]) -> Iterator[tuple[Document, ...]]:
        given = self._given(prompts)
        for prompt, answer in zip(given, self._replies(responses), strict=True):
            yield (
                Document([*prompt, *answer], [not self.loss_on_answer] * len(prompt) + [True] * len(answer)),
            )

    def _preferences(
        self, prompts: list[Any], chosen: list[Any], rejected: list[Any]
    ) -> Iterator[tuple[Document, ...]]:
        """Yield two documents per example: the prompt with the chosen answer, and with the rejected one."""
        rows = zip(prompts, chosen, rejected, strict=True)
        for is_text, run in groupby(rows, key=lambda row: all(isinstance(value, str) for value in row)):
            pairs = self._text_pairs if is_text else self._conversation_pairs
            yield from pairs(list(run))

    def _text_pairs(self, rows: list[tuple[str, str, str]]) -> Iterator[tuple[Document, ...]]:
        given = self._given([prompt for prompt, *_ in rows])
        replies = [self._replies([row[which] for row in rows]) for which in (1, 2)]
        for row, prompt, *pair in zip(rows, given, *replies, strict=True):
            yield tuple(
                # An empty answer has no targets, not even its end of text.
                Document([*prompt, *answer], [False] * len(prompt) + [bool(text.strip())] * len(answer))
                for text, answer in zip(row[1:], pair, strict=True)
            )

    def _conversation_pairs(self, rows: list[tuple[Any, Any, Any]]) -> Iterator[tuple[Document, ...]]:
        return (self._conversation_pair(row) for row in rows)

    def _conversation_pair(self, row: tuple[Any, Any, Any]) -> tuple[Document, ...]:
        """Encode a pair in which the prompt or the answers are messages.

        A text prompt is the user's message. Answers may start with the messages of the prompt.
        """
        columns = self.columns
        self.check_template("a preference with lists of {role, content}", "model.base")
        prompt, chosen, rejected = (
            [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, str(column))
            for value, role, column in zip(
                row,
                ("user", "assistant", "assistant"),
                (columns.prompt, columns.chosen, columns.rejected),
                strict=True,
            )
        )
        replies = (
            _reply(prompt, chosen, str(columns.chosen)),
            _reply(prompt, rejected, str(columns.rejected)),
        )
        return tuple(
            Document([], [])
            if all(turns.is_blank(message) for message in reply)
            else self._conversation([*prompt, *reply], len(prompt), True)
            for reply in replies
        )

    def _given(self, prompts: list[str]) -> list[list[int]]:
        # NB: prompt and answer are tokenised separately: the prompt gets the same tokens as at inference.
        return [self._without_end(ids) for ids in self.tokenizer(prompts)["input_ids"]]

    def _replies(self, responses: list[str]) -> list[list[int]]:
        ids = self.tokenizer(responses, add_special_tokens=False)["input_ids"]
        return [[*answer, self.tokenizer.eos_token_id] for answer in ids]

    def _conversation(
        self,
        messages: list[turns.Message],
        given: int,
        answers_only: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> Document:
        """Render a conversation; assistant messages after the first `given` messages are the targets."""
        if not messages:
            return Document([], [])
        text = self._render(messages, tools)
        ids = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = self._answer_spans(messages, given, text, tools) if answers_only else [(0, len(text))]
        loss_mask = [
            any(begin < answer_end and end > answer_begin for answer_begin, answer_end in answers)
            for begin, end in ids["offset_mapping"]
        ]
        return Document(ids["input_ids"], loss_mask)

    def _answer_spans(
        self,
        messages: list[turns.Message],
        given: int,
        text: str,
        tools: list[dict[str, Any]] | None,
    ) -> list[tuple[int, int]]:
        """Return the spans of assistant messages in the rendered text, (begin, end) in characters."""
        spans = []
        for turn, message in enumerate(messages):
            if turn < given or message["role"] != "assistant":
                continue
            before = self._render(messages[:turn], tools, add_generation_prompt=True)
            through = self._render(messages[: turn + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    "ChatTemplate",
                    "the chat template renders the beginning of a conversation differently once it goes on, so "
                    "answers cannot be told from prompts: set objective.lossOn: All or another model.chatTemplate",
                )
            spans.append((len(before), len(through)))
        return spans

    def _render(
        self,
        messages: list[turns.Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return chat_templates.render(
                self.tokenizer, messages, tools, add_generation_prompt=add_generation_prompt
            )
        except chat_templates.FAILURES as error:
            raise DataError(
                "ChatTemplate", f"the chat template cannot render a conversation of the data: {error}"
            ) from error

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _fit(self, documents: tuple[Document, ...]) -> tuple[Document, ...] | None:
        """Apply training.overlong; None: the example is dropped."""
        longest = max(len(document.tokens) for document in documents)
        if longest <= self.max_length:
            return documents
        if self.overlong == "Fail":
            raise DataError(
                "OverlongExample",
                f"an example has {longest} tokens, above training.maxLength {self.max_length}: raise it, or set "
                "training.overlong to Drop or Truncate",
            )
        if self.overlong == "Drop":
            self.counts["too long"] += 1
            return None
        self.counts["truncated"] += 1
        self.counts["tokens cut"] += sum(max(0, len(each.tokens) - self.max_length) for each in documents)
        return tuple(document.first(self.max_length) for document in documents)


def _texts(rows: dict[str, list[Any]], column: str) -> list[str]:
    """The values of a column of texts."""
    if not all(isinstance(value, str) for value in rows[column]):
        raise DataError(
            "ColumnType",
            f"column {column} holds lists where text is needed: name it in data.columns.messages if they are "
            "conversations",
        )
    return rows[column]


def _messages(value: Any, column: str) -> list[turns.Message]:
    """The messages in a value of a column of conversations."""
    wrong = turns.wrong_shape(value)
    if wrong is not None:
        raise DataError(
            "MessageShape",
            f"a row of column {column} is not a list of {{role, content}}, {wrong}: correct such rows or filter them out",
        )
    try:
        return turns.messages(value)
    except ValueError as error:
        raise DataError(
            "MessageShape",
            f"a row of column {column} is wrong, {error}: correct such rows or filter them out",
        ) from error


def _tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """The tools in a value of a column of tools."""
    try:
        return turns.tools(value)
    except ValueError as error:
        raise DataError(
            "ToolShape", f"a row of column {column} is wrong, {error}: correct such rows or filter them out"
        ) from error


def _reply(prompt: list[turns.Message], answer: list[turns.Message], column: str) -> list[turns.Message]:
    """What an answer adds to the prompt, which it may repeat."""
    try:
        return turns.reply(prompt, answer)
    except ValueError as error:
        raise DataError("MessageShape", f"a row of column {column} {error}") from error
