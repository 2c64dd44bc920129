"""From the splits to token ids: read, tokenise, and decide on which tokens the loss is taken."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from finetune_crds.data import Columns
from finetune_trainer.outcome import DataError, RecipeRefusedError
from finetune_trainer.train import storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.data import Data, Splits
    from finetune_crds.recipe import Recipe

_BATCH_ROWS = 1024
SPLIT_COLUMN = "split"


@dataclass(frozen=True)
class Split:
    """Tokenised examples, one after the other.

    tokens: token ids, int32 [tokens].
    learned: whether the loss is taken on the token, bool [tokens].
    offsets: where each example begins, and where the last ends, int64 [examples + 1].
    """

    tokens: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each example, int64 [examples]."""
        return np.diff(self.offsets)

    def save(self, folder: Path) -> None:
        """Write the arrays to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokens", "learned", "offsets"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Split:
        """Map the arrays in `folder` into memory, shared by all ranks of the pod."""
        return cls(
            *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "learned", "offsets"))
        )


@dataclass(frozen=True)
class Encoded:
    """One tokenised example: token ids, int32 [tokens], and whether the loss is taken on each, bool [tokens]."""

    tokens: np.ndarray
    learned: np.ndarray

    @classmethod
    def of(cls, tokens: list[int], learned: list[bool]) -> Encoded:
        """The example as arrays: a whole split of lists would take many times the memory."""
        return cls(np.array(tokens, np.int32), np.array(learned, np.bool_))


@dataclass
class Encoder:
    """Turns rows into tokens."""

    tokenizer: PreTrainedTokenizerBase
    columns: Columns
    loss_on_answer: bool
    max_length: int
    overlong: str
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """The encoder that a recipe describes.

        Raises:
            RecipeRefusedError: examples are conversations, and nothing says how to render them.
        """
        columns = example_columns(recipe.data)
        if columns.messages is not None and tokenizer.chat_template is None:
            raise RecipeRefusedError(
                f"data.columns.messages needs a chat template, and the tokenizer of {recipe.model.base} has none: "
                "set model.chatTemplate"
            )
        return cls(
            tokenizer=tokenizer,
            columns=columns,
            loss_on_answer=recipe.objective.loss_on != "All",
            max_length=recipe.training.max_length,
            overlong=recipe.training.overlong,
        )

    def encode(self, rows: dict[str, list[Any]]) -> Iterator[Encoded]:
        """The examples of a batch of columns; those above the maximum length as the recipe says.

        Raises:
            DataError: an example is too long and overlong is Fail.
        """
        for example in self._encode_whole(rows):
            self.counts["read"] += 1
            fitting = example if len(example.tokens) <= self.max_length else self._fit(example)
            if fitting is None:
                continue
            if fitting.learned[1:].any():
                self.counts["kept"] += 1
                yield fitting
            else:
                self.counts["without an answer"] += 1

    def summary(self) -> str:
        """What became of the examples of the last split."""
        return ", ".join(f"{number:,} {what}" for what, number in self.counts.items())

    def _encode_whole(self, rows: dict[str, list[Any]]) -> Iterator[Encoded]:
        if self.columns.text is not None:
            return self._texts(rows[self.columns.text])
        if self.columns.messages is not None:
            return self._conversations(rows[self.columns.messages])
        assert self.columns.prompt is not None  # noqa: S101 - the recipe was refused otherwise
        assert self.columns.response is not None  # noqa: S101
        return self._answers(rows[self.columns.prompt], rows[self.columns.response])

    def _texts(self, texts: list[str]) -> Iterator[Encoded]:
        for ids in self.tokenizer(texts)["input_ids"]:
            tokens = [*self._without_end(ids), self.tokenizer.eos_token_id]
            yield Encoded.of(tokens, [True] * len(tokens))

    def _answers(self, prompts: list[str], responses: list[str]) -> Iterator[Encoded]:
        # NB: prompt and answer are tokenised apart, so that the prompt has the tokens it has at inference.
        prompt_ids = self.tokenizer(prompts)["input_ids"]
        response_ids = self.tokenizer(responses, add_special_tokens=False)["input_ids"]
        for prompt, response in zip(prompt_ids, response_ids, strict=True):
            given = self._without_end(prompt)
            answer = [*response, self.tokenizer.eos_token_id]
            learned = [not self.loss_on_answer] * len(given) + [True] * len(answer)
            yield Encoded.of([*given, *answer], learned)

    def _conversations(self, conversations: list[list[dict[str, str]]]) -> Iterator[Encoded]:
        for messages in conversations:
            text = self._render(messages)
            ids = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            answers = self._answer_spans(messages, text) if self.loss_on_answer else [(0, len(text))]
            learned = [
                any(begin < answer_end and end > answer_begin for answer_begin, answer_end in answers)
                for begin, end in ids["offset_mapping"]
            ]
            yield Encoded.of(ids["input_ids"], learned)

    def _answer_spans(self, messages: list[dict[str, str]], text: str) -> list[tuple[int, int]]:
        """Where in the rendered conversation the assistant speaks, as (begin, end) in characters."""
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:turn], add_generation_prompt=True)
            through = self._render(messages[: turn + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    "ChatTemplate",
                    "the chat template renders the beginning of a conversation differently once it goes on, so "
                    "answers cannot be told from prompts: set objective.lossOn: All or another model.chatTemplate",
                )
            spans.append((len(before), len(through)))
        return spans

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise DataError(
                "ChatTemplate", f"the chat template does not take a conversation of the data: {error}"
            ) from error
        return str(text)

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _fit(self, example: Encoded) -> Encoded | None:
        """What becomes of an example above the maximum length; None: it is left out."""
        if self.overlong == "Fail":
            raise DataError(
                "OverlongExample",
                f"an example has {len(example.tokens)} tokens, above training.maxLength {self.max_length}: raise "
                "it, or set training.overlong to Drop or Truncate",
            )
        if self.overlong == "Drop":
            self.counts["too long"] += 1
            return None
        self.counts["truncated"] += 1
        return Encoded(example.tokens[: self.max_length], example.learned[: self.max_length])


def example_columns(data: Data) -> Columns:
    """Where training finds an example: a prepared table has columns of its own making."""
    if data.prepare is None:
        return data.columns
    if data.prepare.response_template is not None:
        return Columns(prompt="prompt", response="response")
    if data.prepare.prompt_template is not None or data.columns.text is not None:
        return Columns(text="text")
    if data.columns.messages is not None:
        return Columns(messages="messages")
    return Columns(prompt="prompt", response="response")


def tokenize(splits: Splits, name: str, encoder: Encoder) -> Split | None:
    """Read and tokenise a split; None when there is no such split, which is an error only for `train`.

    Examples come in the order of their tokens' hash: it depends on nothing but the examples themselves, not on
    the files they were in.

    Raises:
        DataError: the table or a column is missing, a value is null, or nothing is left to train on.
    """
    encoder.counts.clear()
    wanted = [column for column in encoder.columns.to_json().values() if column]
    examples = [example for rows in read(splits, name, wanted) for example in encoder.encode(rows)]
    if not examples and (name == "train" or encoder.counts["read"]):
        raise DataError("EmptySplit", _nothing_left(splits, name, encoder))
    return _joined(sorted(examples, key=_fingerprint)) if examples else None


def _nothing_left(splits: Splits, name: str, encoder: Encoder) -> str:
    place = splits.path or getattr(splits, name)
    if not encoder.counts["read"]:
        return f"{place} has no rows of the split {name}: look at how the splits were made"
    return (
        f"no example of the split {name} in {place} is left ({encoder.summary()}): raise training.maxLength "
        f"above {encoder.max_length}, or look at the data"
    )


def _fingerprint(example: Encoded) -> bytes:
    return hashlib.blake2b(example.tokens.tobytes(), digest_size=16).digest()


def _joined(examples: list[Encoded]) -> Split:
    return Split(
        np.concatenate([example.tokens for example in examples]),
        np.concatenate([example.learned for example in examples]),
        np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int64),
    )


def read(splits: Splits, name: str, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Stream the rows of a split as columns; nothing when the recipe names no files for it."""
    if splits.format == "Delta":
        batches, where = _delta_batches(splits, name, columns), f"the split {name} of {splits.path}"
    else:
        where = getattr(splits, name)
        batches = _file_batches(where, splits.format, columns) if where else iter(())
    for batch in batches:
        for column in batch.schema.names:
            if batch.column(column).null_count:
                raise DataError(
                    "NullValue", f"column {column} has rows without a value in {where}: filter them out"
                )
        if batch.num_rows:
            yield batch.to_pydict()


def delta_version(splits: Splits) -> int | None:
    """The version of the Delta table that is to be read; None for files.

    Raises:
        DataError: there is no such table or version.
    """
    return _delta_table(splits).version() if splits.format == "Delta" else None


def _delta_table(splits: Splits) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    assert splits.path is not None  # noqa: S101 - the schema demands it
    path = splits.path.replace("s3a://", "s3://", 1)
    try:
        return DeltaTable(path, version=splits.version, storage_options=storage.delta_options(path))
    except TableNotFoundError as error:
        raise DataError(
            "MissingTable", f"data.splits.path {splits.path} is no Delta table: correct the path"
        ) from error
    except Exception as error:
        if splits.version is not None and "version" in str(error).lower():
            raise DataError(
                "MissingVersion",
                f"the Delta table {splits.path} has no version {splits.version}: name one that it has",
            ) from error
        raise


def _delta_batches(splits: Splits, name: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow.dataset as ds

    dataset = _delta_table(splits).to_pyarrow_dataset()
    _require(dataset.schema, [SPLIT_COLUMN, *columns], f"the Delta table {splits.path}")
    yield from dataset.to_batches(
        columns=columns, filter=ds.field(SPLIT_COLUMN) == name, batch_size=_BATCH_ROWS
    )


def _file_batches(place: str, kind: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow.dataset as ds

    files, path = storage.filesystem(place)
    if not files.exists(path):
        raise DataError("MissingFile", f"{place} does not exist: mount the volume or correct data.splits")
    dataset = ds.dataset(path, format="parquet" if kind == "Parquet" else "json", filesystem=files)
    _require(dataset.schema, columns, place)
    yield from dataset.to_batches(columns=columns, batch_size=_BATCH_ROWS)


def _require(schema: pa.Schema, columns: list[str], where: str) -> None:
    import pyarrow as pa

    missing = [column for column in columns if column not in schema.names]
    if missing:
        known = ", ".join(sorted(schema.names))
        raise DataError("MissingColumn", f"{where} has no column {', '.join(missing)}: it has {known}")
    for column in columns:
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_list(kind)):
            raise DataError(
                "ColumnType",
                f"column {column} of {where} holds {kind}: examples are text, or lists of {{role, content}}",
            )
