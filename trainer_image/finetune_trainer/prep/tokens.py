"""Token counts of examples, as training encodes them."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import uuid
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkFiles
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from finetune_trainer.prep import chat, session
from finetune_trainer.prep.plan import CHOSEN, MESSAGES, PROMPT
from finetune_trainer.prep.steps import TOKENS
from finetune_trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.prepare import Unrenderable
    from finetune_crds.training import Model

# NB: the encodings of a whole Arrow batch (10,000 rows) at once leave the processor's cache: a third of the speed is lost.
_AT_ONCE = 256


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
    of_texts = all(isinstance(frame.schema[name].dataType, StringType) for name in columns)
    load = plain(model, folder) if of_texts else None
    if load is None:
        load = partial(_whole, model, shipped(frame.sparkSession, folder))
    return frame.mapInArrow(partial(_count_batches, load=load, columns=columns, drop=drop), schema)


@dataclass(frozen=True)
class Plain:
    """What counts texts: a model's tokenizer without its chat template."""

    backend_tokenizer: Tokenizer
    eos_token_id: int


def plain(model: Model, folder: Path) -> Callable[[], Plain] | None:
    """Return a function that loads the tokenizer of texts in any task; None for a tokenizer that is code of the model.

    NB: it travels with the code of the task, as the driver loaded it: with what its configuration adds to its file. A worker then
    need not import transformers and torch, which takes 3 s and 200 MB.
    """
    tokenizer = load_tokenizer(model, folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    return partial(
        _from_text,
        zlib.compress(backend.to_str().encode()),
        int(tokenizer.eos_token_id),
        split_special_tokens=bool(tokenizer.split_special_tokens),
    )


@lru_cache(maxsize=1)
def _from_text(compressed: bytes, eos_token_id: int, *, split_special_tokens: bool) -> Plain:
    from tokenizers import Tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    backend = Tokenizer.from_str(zlib.decompress(compressed).decode())
    # NB: its text does not have this setting, which transformers makes with every call.
    backend.encode_special_tokens = split_special_tokens
    return Plain(backend, eos_token_id)


def _whole(model: Model, find: Callable[[], Path]) -> PreTrainedTokenizerBase:
    return load_tokenizer(model, find())


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
    load: Callable[[], PreTrainedTokenizerBase | Plain],
    columns: tuple[str, ...],
    drop: bool,
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    tokenizer = load()
    for batch in batches:
        examples = {name: batch.column(name).to_pylist() for name in columns}
        counts = pa.array(count(tokenizer, examples, drop=drop), pa.int32())
        yield pa.RecordBatch.from_arrays([*batch.columns, counts], [*batch.schema.names, TOKENS])


def count(
    tokenizer: PreTrainedTokenizerBase | Plain, examples: dict[str, list[Any]], *, drop: bool = False
) -> list[int | None]:
    """Return the length of each example in tokens, as training encodes it; None for one to drop, which a template refused.

    A conversation as its chat template renders it; a text, or a prompt followed by its response, with the end of
    text behind it. A preference counts twice: its prompt followed by either answer.
    """
    if MESSAGES in examples or any(isinstance(prompt, list) for prompt in examples.get(PROMPT, ())):
        assert not isinstance(tokenizer, Plain)  # noqa: S101 - with_tokens loads the whole one for conversations
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


def _encode(
    tokenizer: PreTrainedTokenizerBase | Plain, texts: list[str], *, special: bool
) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        assert not isinstance(tokenizer, Plain)  # noqa: S101 - it has one
        return list(tokenizer(texts, add_special_tokens=special)["input_ids"])
    # NB: a tokenizer.json may enable truncation and padding, which would hide the length of an example.
    backend.no_truncation()
    backend.no_padding()
    return [
        encoding.ids
        for at in range(0, len(texts), _AT_ONCE)
        for encoding in backend.encode_batch_fast(texts[at : at + _AT_ONCE], add_special_tokens=special)
    ]
