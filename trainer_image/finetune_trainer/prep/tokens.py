"""Token counts of examples, as training encodes them."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import uuid
import zipfile
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkFiles
from pyspark.sql.types import IntegerType, StructField, StructType

from finetune_trainer.prep import chat, session
from finetune_trainer.prep.plan import CHOSEN, MESSAGES, PROMPT
from finetune_trainer.prep.steps import TOKENS
from finetune_trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.prepare import Unrenderable
    from finetune_crds.training import Model


def with_tokens(
    frame: DataFrame,
    model: Model,
    folder: Path,
    columns: tuple[str, ...],
    *,
    unrenderable: Unrenderable = "Fail",
) -> DataFrame:
    """Add the column `tokens`: the length of the example in `columns`.

    Args:
        unrenderable: Drop gives null for an example that a template refuses. Fail fails the task.
    """
    drop = unrenderable == "Drop"
    schema = StructType([*frame.schema.fields, StructField(TOKENS, IntegerType(), nullable=drop)])
    find = shipped(frame.sparkSession, folder)
    counted = partial(_count_batches, model=model, find=find, columns=columns, drop=drop)
    return frame.mapInArrow(counted, schema)


def shipped(spark: SparkSession, folder: Path) -> Callable[[], Path]:
    """Return a function that finds a folder of this pod in any task; executors elsewhere get a copy of it."""
    context = session.context(spark)
    if context is None:
        # NB: without a context, the code of a task is all that surely reaches it.
        return partial(_written, _zipped(folder))
    if context.master.startswith("local"):
        return partial(Path, folder)
    name = f"tokenizer-{uuid.uuid4().hex}"
    archive = shutil.make_archive(str(Path(tempfile.mkdtemp()) / name), "zip", folder)
    context.addArchive(f"{archive}#{name}")
    return partial(_unpacked, name)


def _zipped(folder: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as scratch:
        return Path(shutil.make_archive(f"{scratch}/tokenizer", "zip", folder)).read_bytes()


@lru_cache(maxsize=1)
def _written(archive: bytes) -> Path:
    """The folder that an archive holds, on the disk of this Python worker."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(tempfile.mkdtemp(prefix="finetune-tokenizer-"))
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
    return folder


def _unpacked(name: str) -> Path:
    return Path(SparkFiles.get(name)).absolute()


def _count_batches(
    batches: Iterable[pa.RecordBatch],
    *,
    model: Model,
    find: Callable[[], Path],
    columns: tuple[str, ...],
    drop: bool,
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    tokenizer = load_tokenizer(model, find())
    for batch in batches:
        examples = {name: batch.column(name).to_pylist() for name in columns}
        counts = pa.array(count(tokenizer, examples, drop=drop), pa.int32())
        yield pa.RecordBatch.from_arrays([*batch.columns, counts], [*batch.schema.names, TOKENS])


def count(
    tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Any]], *, drop: bool = False
) -> list[int | None]:
    """Return the length of each example in tokens, as training encodes it; None for one to drop, which a template refused.

    A conversation as its chat template renders it; a text, or a prompt followed by its response, with the end of
    text behind it. A preference counts twice: its prompt followed by either answer.
    """
    if MESSAGES in examples or any(isinstance(prompt, list) for prompt in examples.get(PROMPT, ())):
        return _conversations(tokenizer, examples, drop=drop)
    refused = [None in row for row in zip(*examples.values(), strict=True)]
    first, *others = [[text or "" for text in texts] for texts in examples.values()]
    end = tokenizer.eos_token_id
    lengths = [len(ids) + (ids[-1:] != [end]) for ids in _encode(tokenizer, first, special=True)]
    if CHOSEN in examples:
        lengths = [2 * length for length in lengths]
    for texts in others:
        more = _encode(tokenizer, texts, special=False)
        lengths = [length + len(ids) for length, ids in zip(lengths, more, strict=True)]
    return [None if gone else length for gone, length in zip(refused, lengths, strict=True)]


def _conversations(
    tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Any]], *, drop: bool
) -> list[int | None]:
    rendered: list[list[str] | None] = []
    for values in zip(*examples.values(), strict=True):
        if None in values:
            rendered.append(None)
            continue
        try:
            rendered.append(chat.texts(tokenizer, dict(zip(examples, values, strict=True))))
        except ValueError:
            if not drop:
                raise
            rendered.append(None)
    texts = [text for one in rendered for text in one or ()]
    lengths = map(len, _encode(tokenizer, texts, special=False))
    return [None if one is None else sum(islice(lengths, len(one))) for one in rendered]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer(texts, add_special_tokens=special)["input_ids"])
    # NB: a tokenizer.json may enable truncation and padding, which would hide the length of an example.
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
