"""The same odd files through both readers: that of preparations, and that of splits which training and evaluation read directly."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.data import Splits
from finetune_crds.source import Source
from finetune_trainer.examples import column_values
from finetune_trainer.examples.encodings import HALF_CHARACTER, NOT_UTF8
from finetune_trainer.examples.file_formats import ARRAY, POINTER, explain_unreadable_line
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.source import reader, text_files
from finetune_trainer.train.data import read
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
NOON = datetime(2024, 5, 1, 12)  # noqa: DTZ001 - a time without a zone


def parquet(codec: str = "snappy", **columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression=codec)
    return buffer.getvalue()


def nanoseconds(zone: str | None = None) -> pa.Array:
    return pa.array([NOON], pa.timestamp("us", zone)).cast(pa.timestamp("ns", zone))


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


# Types that Spark does not read, and the sentence about them.
UNREADABLE: dict[str, tuple[pa.Array, str]] = {
    "half": (pa.array([1.5], pa.float16()), "floats of 16 bits: write floats of 32 or 64 bits"),
    "digits": (
        pa.array([Decimal("1" * 45)], pa.decimal256(50)),
        "decimals of more than 38 digits: write them with at most 38 digits, or as text",
    ),
    "time": (pa.array([1], pa.time64("us")), "times of day: write them as text"),
    "fine_time": (pa.array([1], pa.time64("ns")), "times of day: write them as text"),
    "uuid": (pa.array([b"a" * 16], pa.uuid()), "bytes: write them as text"),
}
# Files of a folder by format, and the texts of the column `text` in them, or the sentence about one of them.
READ: dict[str, tuple[str, dict[str, bytes], list[str] | str]] = {
    "compressed": (
        "JSONLines",
        {
            "a.jsonl.gz": gzip.compress(line("a")),
            "b.jsonl.bz2": bz2.compress(line("b")),
            "c.jsonl": line("c"),
            "d.jsonl.zst": pa.compress(line("d"), "zstd", asbytes=True),
            "e.jsonl.GZ": gzip.compress(line("e")),
            "f.jsonl.ZST": pa.compress(line("f"), "zstd", asbytes=True),
        },
        ["a", "b", "c", "d", "e", "f"],
    ),
    "compressed with xz": (
        "JSONLines",
        {"a.jsonl.xz": lzma.compress(line("a"))},
        "a.jsonl.xz cannot be read (its name ends in .xz): decompress the file, or compress it with one of .gz, .bz2, .zst",
    ),
    "a compression of Hadoop": (
        "JSONLines",
        {"a.jsonl.deflate": zlib.compress(line("a"))},
        "a.jsonl.deflate cannot be read (its name ends in .deflate): decompress the file, or compress it with one of .gz, .bz2, .zst",
    ),
    "an archive": (
        "JSONLines",
        {"a.tar.gz": gzip.compress(b"a" * 512), "b.jsonl": line("b")},
        "a.tar.gz cannot be read (its name ends in .tar): unpack the archive",
    ),
    "compressed Parquet": (
        "Parquet",
        {"a.parquet.gz": gzip.compress(parquet(text=["a"]))},
        "a.parquet.gz cannot be read (its name ends in .gz): decompress the file, since Parquet compresses its columns itself",
    ),
    "codecs of Parquet": (
        "Parquet",
        {f"{codec}.parquet": parquet(codec, text=[codec]) for codec in ("gzip", "lz4", "none", "zstd")},
        ["gzip", "lz4", "none", "zstd"],
    ),
    "Brotli": (
        "Parquet",
        {"a.parquet": parquet("brotli", text=["a"])},
        "a.parquet is compressed with Brotli: write the file with Snappy, gzip, Zstandard or LZ4",
    ),
    "hidden files and subfolders": (
        "JSONLines",
        {"_a.jsonl": b"x", ".b.jsonl": b"x", "2024/c.jsonl": line("c"), "d.jsonl": line("d")},
        ["c", "d"],
    ),
    "names that are patterns": (
        "JSONLines",
        {"[a].jsonl": line("a"), "b*.jsonl": line("b"), "{c}.jsonl": line("c"), "d:e.jsonl": line("d")},
        ["a", "b", "c", "d"],
    ),
    "an empty file": ("JSONLines", {"a.jsonl": b"", "b.jsonl": line("b")}, ["b"]),
    "a byte order mark": ("JSONLines", {"a.jsonl": b"\xef\xbb\xbf" + line("a")}, ["a"]),
    "names in two cases": ("JSONLines", {"a.jsonl": b'{"ID": 1, "id": 2, "text": "a"}'}, ["a"]),
    "surrogate pairs": (
        "JSONLines",
        {"a.jsonl": b'{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud800"}'},
        ["\\ud800", "😀"],
    ),
    "half a pair": (
        "JSONLines",
        {"a.jsonl": line("a") + b'{"text": "\\ud83d x"}'},
        explain_unreadable_line(2, "a.jsonl", HALF_CHARACTER),
    ),
    "the other half": (
        "JSONLines",
        {"a.jsonl": b'{"text": "x\\ude00"}'},
        explain_unreadable_line(1, "a.jsonl", HALF_CHARACTER),
    ),
    "another encoding": (
        "JSONLines",
        {"a.jsonl": line("a") * 3 + '{"text": "schön"}'.encode("cp1252"), "b.jsonl": line("b")},
        explain_unreadable_line(4, "a.jsonl", NOT_UTF8),
    ),
    "an array": (
        "JSONLines",
        {"a.jsonl": b'[\n{"text": "a"}\n]'},
        explain_unreadable_line(1, "a.jsonl", ARRAY),
    ),
    "a pointer": (
        "JSONLines",
        {"a.jsonl": line("a"), "[b].jsonl": LFS},
        explain_unreadable_line(1, "[b].jsonl", POINTER),
    ),
    "a pointer in place of Parquet": (
        "Parquet",
        {"a.parquet": LFS},
        explain_unreadable_line(1, "a.parquet", POINTER),
    ),
    "names of Parquet that are patterns": (
        "Parquet",
        {"[a].parquet": parquet(text=["a"]), "b:c.parquet": parquet(text=["b"])},
        ["a", "b"],
    ),
    "names of Parquet in two cases": ("Parquet", {"a.parquet": parquet(ID=[1], id=[2], text=["a"])}, ["a"]),
    "a dictionary": (
        "Parquet",
        {"a.parquet": parquet(text=pa.array(["a", "a"]).dictionary_encode())},
        ["a", "a"],
    ),
    "unused columns that Spark does not read": (
        "Parquet",
        {
            "a.parquet": parquet(text=["a"], **{name: values for name, (values, _) in UNREADABLE.items()}),
            "b.parquet": parquet(text=["b"], other=[1]),
        },
        ["a", "b"],
    ),
    "nanoseconds": ("Parquet", {"a.parquet": parquet(text=nanoseconds())}, ["2024-05-01 12:00:00"]),
    "nanoseconds in UTC": (
        "Parquet",
        {"a.parquet": parquet(text=nanoseconds("UTC"))},
        ["2024-05-01 12:00:00"],
    ),
    "JSON text and durations": (
        "Parquet",
        {
            "a.parquet": parquet(text=pa.array(['{"a": 1}'], pa.json_())),
            "b.parquet": parquet(text=pa.array(["b"], pa.string_view())),
        },
        ["b", '{"a": 1}'],
    ),
    "a duration": ("Parquet", {"a.parquet": parquet(text=pa.array([7], pa.duration("ms")))}, ["7"]),
    **{
        f"a used column: {name}": (
            "Parquet",
            {"a.parquet": parquet(text=values)},
            f"column text of a.parquet holds {sentence}",
        )
        for name, (values, sentence) in UNREADABLE.items()
    },
    "a list": (
        "Parquet",
        {"a.parquet": parquet(text=[["a"]])},
        (
            "column text contains lists, but text is required: name the column in data.columns.messages if the lists are "
            "conversations"
        ),
    ),
}
# What preparations know of all files of a source, and the others of each file: by the name of either.
OF_COLUMNS: dict[str, tuple[str, bytes, str]] = {
    "bytes": ("Parquet", parquet(text=[b"a"]), "column text of WHERE holds bytes: write them as text"),
    "structures": (
        "Parquet",
        parquet(text=[{"a": 1}]),
        "column text of WHERE holds structures: examples are text, numbers, booleans, dates or times, or lists of {role, content}",
    ),
    "objects": (
        "JSONLines",
        b'{"text": {"a": 1}}',
        "column text of WHERE holds structures: examples are text, numbers, booleans, dates or times, or lists of {role, content}",
    ),
    "a name in another case": (
        "Parquet",
        parquet(TEXT=["a"]),
        "WHERE has column TEXT, not text: write the name with the same case in both places",
    ),
    "a name of JSON lines in another case": (
        "JSONLines",
        b'{"TEXT": "a"}',
        "WHERE has column TEXT, not text: write the name with the same case in both places",
    ),
    "a name in two cases": (
        "Parquet",
        parquet(Text=["a"], text=["b"]),
        "WHERE has the columns Text and text, which differ only in case: rename all but text",
    ),
    "a name of JSON lines in two cases": (
        "JSONLines",
        b'{"Text": "a"}\n{"text": "b"}',
        "WHERE has the columns Text and text, which differ only in case: rename all but text",
    ),
    "no such column": ("Parquet", parquet(b=["a"], a=["b"]), "WHERE has no column text: it has a and b"),
}


def prepared(spark: SparkSession, kind: str, folder: Path, scratch: Path) -> list[str]:
    asked = build_request(recipe(source={"type": kind, "path": str(folder)}))
    with spark_errors.translate_errors(asked):
        corpus = reader.read(spark, asked.source, scratch)
        frame = corpus.frame
        with text_files.checking_on_failure(spark, corpus.texts):
            reader.require(frame, ["text"], str(folder))
            reader.require_texts(frame, ["text"], str(folder))
        if corpus.texts is not None:
            text_files.check(spark, *corpus.texts)
        return [row["text"] for row in plain_text.with_texts(frame, ["text"]).select("text").collect()]


def direct(kind: str, folder: Path) -> list[str]:
    splits = Splits.model_validate({"type": kind, "train": str(folder)})
    batches = read.read(splits, "train", ["text"])
    return [text for batch in batches for text in column_values.get_texts(batch, "text")]


@pytest.mark.parametrize("case", READ)
def test_both_readers_read_the_same(case: str, spark: SparkSession, tmp_path: Path) -> None:
    kind, contents, expected = READ[case]
    folder = tmp_path / "corpus"
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    readers: dict[str, Callable[[], list[str]]] = {
        "prepared": lambda: sorted(prepared(spark, kind, folder, tmp_path)),
        "direct": lambda: sorted(direct(kind, folder)),
    }
    outcomes: dict[str, list[str] | str] = {}
    for name, read_texts in readers.items():
        try:
            outcomes[name] = read_texts()
        except DataError as error:
            outcomes[name] = error.message.replace(f"{folder}/", "")
    assert outcomes == dict.fromkeys(readers, expected)


@pytest.mark.parametrize("case", OF_COLUMNS)
def test_both_readers_refuse_the_same_columns(case: str, spark: SparkSession, tmp_path: Path) -> None:
    kind, content, sentence = OF_COLUMNS[case]
    (folder := tmp_path / "corpus").mkdir()
    (folder / "a").write_bytes(content)
    with pytest.raises(DataError) as refused:
        prepared(spark, kind, folder, tmp_path)
    assert refused.value.message == sentence.replace("WHERE", str(folder))
    with pytest.raises(DataError) as refused:
        direct(kind, folder)
    assert refused.value.message == sentence.replace("WHERE", str(folder / "a"))


# Sources that only preparations have: format, content of the file `a`, reason and sentence.
REFUSED: dict[str, tuple[str, bytes, str, str]] = {
    "CSV in another encoding": (
        "CSV",
        "text\nja\nschön\n".encode("cp1252"),
        "UnreadableSource",
        explain_unreadable_line(3, "a", NOT_UTF8),
    ),
    "a pointer in place of CSV": ("CSV", LFS, "UnreadableSource", explain_unreadable_line(1, "a", POINTER)),
    "nothing": (
        "JSONLines",
        b"",
        "EmptySource",
        "data.source.path a has no rows: check what was written to it",
    ),
    "blank lines": (
        "JSONLines",
        b"\n\n",
        "EmptySource",
        "data.source.path a has no rows: check what was written to it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_preparation_refuses(case: str, spark: SparkSession, tmp_path: Path) -> None:
    kind, content, *expected = REFUSED[case]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError) as refused:
        prepared(spark, kind, tmp_path / "a", tmp_path)
    message = refused.value.message.replace(f"{tmp_path}/", "")
    assert [refused.value.reason, message] == expected


def test_a_text_of_25_million_characters(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line("x" * 25_000_000))
    frame = reader.read(spark, Source(type="JSONLines", path=str(tmp_path)), tmp_path).frame
    assert frame.selectExpr("length(text) AS length").collect()[0]["length"] == 25_000_000
