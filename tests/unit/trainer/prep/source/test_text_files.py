"""Text files that are no text are refused with file and line, before Spark replaces what it cannot read."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.examples.encodings import HALF_CHARACTER, NOT_UTF8
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.source import text_files
from unit.trainer.prep.recipes import prepare_quickly, prepared, recipe

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from unit.trainer.prep.recipes import Json

ACCENT = 'a,b\n1,"two\nlines"\n2,caf\xe9\n'
REMEDIES = {
    NOT_UTF8: "convert the file to UTF-8, for example with iconv -f CP1252 -t UTF-8",
    HALF_CHARACTER: "correct the line, or write the file again",
}
# The kind of file, its name, its bytes, and the line that cannot be read with the reason; None where all can.
FILES: dict[str, tuple[str, str, bytes, tuple[int, str] | None]] = {
    "cp1252": ("CSV", "a b.csv", ACCENT.encode("cp1252"), (4, NOT_UTF8)),
    "UTF-8": ("CSV", "a.csv", ACCENT.encode(), None),
    "UTF-8 with a byte order mark and a replacement character": (
        "CSV",
        "a.csv",
        "a,b\n1,\ufffd\n".encode("utf-8-sig"),
        None,
    ),
    "UTF-16": ("CSV", "a.csv", ACCENT.encode("utf-16"), (1, NOT_UTF8)),
    "compressed": ("CSV", "a.csv.gz", gzip.compress(ACCENT.encode("cp1252")), (4, NOT_UTF8)),
    "an escape in CSV is text": ("CSV", "a.csv", b"a\n\\ud83d\n", None),
    "JSON in cp1252": ("JSONLines", "a.jsonl", b'{"a":"b"}\n{"a":"caf\xe9"}\n', (2, NOT_UTF8)),
    "a pair": ("JSONLines", "a.jsonl", b'{"a":"\\ud83d\\uDE00 \\u00e9"}\n', None),
    "pairs": ("JSONLines", "a.jsonl", b'{"a":"\\ud83d\\ude00\\ud83d\\ude00"}\n', None),
    "a first half": ("JSONLines", "a.jsonl", b'{"a":"b"}\n\n{"a":"\\uD83D"}\n', (3, HALF_CHARACTER)),
    "a first half before another letter": (
        "JSONLines",
        "a.jsonl",
        b'{"a":"\\ud83d\\u0041"}\n',
        (1, HALF_CHARACTER),
    ),
    "a second half": ("JSONLines", "a.jsonl", b'{"a":"\\ude00"}\n', (1, HALF_CHARACTER)),
    "a second half behind a pair": (
        "JSONLines",
        "a.jsonl",
        b'{"a":"\\ud83d\\ude00\\ude00"}\n',
        (1, HALF_CHARACTER),
    ),
    "a backslash before a u": ("JSONLines", "a.jsonl", b'{"a":"\\\\ud83d"}\n', None),
    "a backslash before a first half": (
        "JSONLines",
        "a.jsonl",
        b'{"a":"\\\\\\ud83d"}\n',
        (1, HALF_CHARACTER),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_no_text_is_refused_with_file_and_line(
    spark: SparkSession, tmp_path: Path, case: str
) -> None:
    kind, name, content, wrong = FILES[case]
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"good-{name}").write_bytes(gzip.compress(b"{}\n") if name.endswith("gz") else b"{}\n")
    try:
        text_files.check(spark, kind, [str(tmp_path)])
    except DataError as error:
        sentence = error.message
    else:
        sentence = ""
    expected = ""
    if wrong is not None:
        number, reason = wrong
        expected = f"line {number} of {tmp_path / name} cannot be read ({reason}): {REMEDIES[reason]}"
    assert sentence == expected


POINTER_LINE = "version https://git-lfs.github.com/spec/v1"
# The kind of file, its text, and whether it is a pointer of Git LFS.
POINTERS: dict[str, tuple[str, str, bool]] = {
    "a pointer": ("CSV", f"{POINTER_LINE}\noid sha256:4d7a\nsize 12345\n", True),
    "a pointer in place of JSON lines": ("JSONLines", f"{POINTER_LINE}\noid sha256:4d7a\nsize 12345\n", True),
    "a value that quotes a pointer": (
        "CSV",
        f'a,b\n1,"{POINTER_LINE}\noid"\n2,"as in\n{POINTER_LINE}\n"\n',
        False,
    ),
}


@pytest.mark.parametrize("case", POINTERS)
def test_only_a_file_that_begins_as_a_pointer_is_one(spark: SparkSession, tmp_path: Path, case: str) -> None:
    kind, text, is_pointer = POINTERS[case]
    (tmp_path / "[a]").write_text(text)
    (tmp_path / "b").write_text("{}\n")
    sentence = ""
    try:
        text_files.check(spark, kind, [str(tmp_path)])
    except DataError as error:
        sentence = error.message
    expected = f"line 1 of {tmp_path}/[a] cannot be read (the file is a Git LFS pointer): run git lfs pull, and copy the file again"
    assert sentence == (expected if is_pointer else "")


def test_lines_are_counted_over_the_blocks_of_a_file(spark: SparkSession, tmp_path: Path) -> None:
    lines = [b"%d,text" % number for number in range(1000)]
    lines[700] = lines[900] = b"\xe9"
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    size = "spark.sql.files.maxPartitionBytes"
    usual = spark.conf.get(size)
    spark.conf.set(size, "1000")
    try:
        with pytest.raises(DataError, match=r"^line 701 of "):
            text_files.check(spark, "CSV", [str(tmp_path)])
    finally:
        spark.conf.set(size, str(usual))


def test_lines_are_read_only_for_a_new_table(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over a large source would learn that nothing is to be done."""
    corpus, evaluation = tmp_path / "corpus.csv", tmp_path / "evaluation.csv"
    corpus.write_text("question,answer\n" + "".join(f"q{number},a{number}\n" for number in range(4)))
    evaluation.write_text("question\none two three four five six seven eight nine\n")
    sets = [{"name": "eval", "type": "CSV", "path": str(evaluation), "columns": ["question"]}]
    changes: Json = {
        "source": {"type": "CSV", "path": str(corpus)},
        "base": str(tokenizer_folder),
        "output": str(tmp_path / "out"),
        "decontaminate": {"sources": sets},
        "splitRatios": {"train": 1, "validation": 0, "test": 0},
    }
    checked: list[str] = []
    check = text_files.check

    def record(spark: SparkSession, kind: str, paths: list[str], settings: dict[str, str]) -> None:
        checked.extend(paths)
        check(spark, kind, paths, settings)

    monkeypatch.setattr(text_files, "check", record)
    first = prepared(spark, recipe(**changes, uid="uid-first", name="first"))
    assert [path.rpartition("/")[2] for path in checked] == [corpus.name, evaluation.name]
    checked.clear()
    second = prepared(spark, recipe(**changes, uid="uid-second", name="second"))
    assert (second.written_by, second.digest, checked) == ("first", first.digest, [])

    evaluation.write_bytes("question\ncafé\n".encode("cp1252"))
    with pytest.raises(DataError, match=rf"^line 2 of {evaluation} cannot be read"):
        prepared(spark, recipe(**changes, uid="uid-third", name="third"))


def text_of(*values: bytes) -> pa.Array:
    """A column of text with any bytes."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values))]
    )


def messages_of(contents: pa.Array) -> pa.Array:
    """A conversation of one question and its answer for each content."""
    roles = pa.array(["user", "assistant"] * len(contents))
    repeated = pa.concat_arrays([contents.take([at, at]) for at in range(len(contents))])
    turns = pa.StructArray.from_arrays([roles, repeated], names=["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(0, 2 * len(contents) + 1, 2), pa.int32()), turns)


WRONG = text_of(b"What?", b"What is caf\xe9?")
# The column `question`, changes to a recipe, and how the bytes are shown.
TABLES: dict[str, tuple[pa.Array, Json, str]] = {
    # NB: what replaces a part of a text makes text of its bytes first.
    "a text in which values are replaced": (WRONG, {"redact": ["Email"]}, r"\x57\x68\x61"),
    "a text": (WRONG, {}, r"\x57\x68\x61"),
    "messages": (
        messages_of(WRONG),
        {"columns": {"type": "Messages", "messages": "question"}},
        "'utf-8' codec can't decode byte 0xe9 in position 11",
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_text_in_a_table_that_is_not_utf8_is_refused(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, case: str
) -> None:
    questions, changes, shown = TABLES[case]
    pq.write_table(pa.table({"question": questions, "answer": ["b", "c"]}), tmp_path / "a.parquet")
    source = {"type": "Parquet", "path": str(tmp_path / "a.parquet")}
    job_recipe = recipe(source=source, base=str(tokenizer_folder), output=str(tmp_path / "out"), **changes)
    with pytest.raises(DataError) as refused:
        prepare_quickly(spark, job_recipe)
    assert refused.value.reason == "UnreadableSource"
    assert refused.value.message.startswith(f"{tmp_path / 'a.parquet'} has text that is not UTF-8 ({shown}")
    assert refused.value.message.endswith("): rewrite its files as UTF-8")
