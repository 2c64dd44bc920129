"""Token counts of examples, as training encodes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import IntegerType, StructField, StructType

from finetune_trainer.prep import chat
from finetune_trainer.prep.plan import CHOSEN, MESSAGES
from finetune_trainer.prep.steps import TOKENS
from finetune_trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.training import Model


def with_tokens(frame: DataFrame, model: Model, folder: Path, columns: tuple[str, ...]) -> DataFrame:
    """Add the column `tokens`: the length of the example in `columns`."""
    schema = StructType([*frame.schema.fields, StructField(TOKENS, IntegerType(), nullable=False)])
    return frame.mapInArrow(partial(_count_batches, model=model, folder=folder, columns=columns), schema)


def _count_batches(
    batches: Iterable[pa.RecordBatch], *, model: Model, folder: Path, columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    tokenizer = load_tokenizer(model, folder)
    for batch in batches:
        examples = {name: batch.column(name).to_pylist() for name in columns}
        counts = pa.array(count(tokenizer, examples), pa.int32())
        yield pa.RecordBatch.from_arrays([*batch.columns, counts], [*batch.schema.names, TOKENS])


def count(tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Any]]) -> list[int]:
    """Return the length of each example in tokens, as training encodes it.

    A conversation as its chat template renders it; a text, or a prompt followed by its response, with the end of
    text behind it. A preference counts twice: its prompt followed by either answer.
    """
    if MESSAGES in examples:
        rendered = [chat.render(tokenizer, turns) for turns in examples[MESSAGES]]
        return [len(ids) for ids in _encode(tokenizer, rendered, special=False)]
    first, *others = examples.values()
    end = tokenizer.eos_token_id
    lengths = [len(ids) + (ids[-1:] != [end]) for ids in _encode(tokenizer, first, special=True)]
    if CHOSEN in examples:
        lengths = [2 * length for length in lengths]
    for texts in others:
        more = _encode(tokenizer, texts, special=False)
        lengths = [length + len(ids) for length, ids in zip(lengths, more, strict=True)]
    return lengths


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer(texts, add_special_tokens=special)["input_ids"])
    # NB: a tokenizer.json may enable truncation and padding, which would hide the length of an example.
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
