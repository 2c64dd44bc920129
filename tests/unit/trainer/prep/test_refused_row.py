"""The place of a row that fails a preparation, as people can find it in their files."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import refused_row
from finetune_trainer.prep.source import text_files
from unit.trainer.prep.recipes import WITHOUT_SAMPLES, Json, prepare_quickly, recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe

DROP = "; to drop these rows, set data.prepare.onTemplateError: Drop"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
REFUSED_PART = (
    "MessageShape: column messages of {place} is invalid, message 1 has a part of type image_url, but only text parts can be trained "
    f"on: correct or remove such rows{DROP}"
)
REFUSED_TEMPLATE = f"TemplateFailed: data.prepare.promptTemplate fails on {{place}}: integer division or modulo by zero{DROP}"
REFUSED_ROLES = (
    "TemplateFailed: the chat template of the model fails on {place} with the roles assistant, user: Roles must alternate"
    + DROP
)
USER_FIRST = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% for turn in messages %}{{ turn['content'] }}{{ eos_token }}{% endfor %}"
)
DIVIDING: Json = {
    "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
    "promptTemplate": "{{ 6 // (question | int) }}",
    "templateSyntax": "Jinja",
}


def chat(text: str, part: Json | None = None) -> Json:
    """A conversation; with a part, its question is a list of parts."""
    question = text if part is None else [{"type": "text", "text": text}, part]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]}


def lines(*rows: Json | str) -> bytes:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def parquet(kind: pa.DataType, *numbers: int) -> bytes:
    buffer = io.BytesIO()
    answers = [f"answer {number}" for number in numbers]
    pq.write_table(pa.table({"question": pa.array(numbers).cast(kind), "answer": answers}), buffer)
    return buffer.getvalue()


def with_roles(*roles: str) -> Json:
    return {"messages": [{"role": role, "content": f"{role} says"} for role in roles]}


# A format, changes to a recipe, the files, the sentence and the place.
PLACES: dict[str, tuple[str, Json, dict[str, bytes], str, str]] = {
    "a part that is no text, among blank lines": (
        "JSONLines",
        {},
        {"a.jsonl": lines(chat("a"), "", " \t", chat("b"), "", chat("c", IMAGE), chat("d", IMAGE))},
        REFUSED_PART,
        "line 6 of {corpus}/a.jsonl",
    ),
    "a conversation that the template refuses": (
        "JSONLines",
        {},
        {"a.jsonl": lines(with_roles("user", "assistant"), with_roles("assistant", "user"))},
        REFUSED_ROLES,
        "line 2 of {corpus}/a.jsonl",
    ),
    "a compressed file in a subfolder, behind rows that are dropped": (
        "JSONLines",
        {"maxChars": 100, "languages": ["en"], "redact": ["Email"]},
        {
            "a b.jsonl": lines(*(chat(f"plain {number}") for number in range(9))),
            "2024/b.jsonl.gz": gzip.compress(lines(chat("long " * 50), chat("a"), chat("b", IMAGE))),
        },
        REFUSED_PART,
        "line 3 of {corpus}/2024/b.jsonl.gz",
    ),
    "CSV with line breaks in values": (
        "CSV",
        DIVIDING,
        {"a.csv": b'question,answer\n1,"a\nb"\n2,c\n0,d\n'},
        REFUSED_TEMPLATE,
        "row 3 of {corpus}/a.csv",
    ),
    "Parquet files whose types differ": (
        "Parquet",
        DIVIDING,
        {"a.parquet": parquet(pa.int32(), 1, 2), "b.parquet": parquet(pa.float64(), 1, 2, 3, 0)},
        REFUSED_TEMPLATE,
        "row 4 of {corpus}/b.parquet",
    ),
}


@pytest.fixture
def build_recipe(tokenizer_folder: Path, tmp_path: Path) -> Callable[[Json, Json], Recipe]:
    model = tmp_path / "model"
    shutil.copytree(tokenizer_folder, model)
    (model / "chat_template.jinja").write_text(USER_FIRST)

    def build(source: Json, changes: Json) -> Recipe:
        ratios = {"train": 1, "validation": 0, "test": 0}
        output = str(tmp_path / "table")
        changes = {"splitRatios": ratios, "columns": None, **WITHOUT_SAMPLES, **changes}
        return recipe(source=source, output=output, base=str(model), **changes)

    return build


def refuse(spark: SparkSession, job_recipe: Recipe) -> str:
    with pytest.raises(DataError) as refused:
        prepare_quickly(spark, job_recipe)
    return f"{refused.value.reason}: {refused.value.message}"


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_the_file_and_the_row_are_named(
    case: tuple[str, Json, dict[str, bytes], str, str],
    spark: SparkSession,
    build_recipe: Callable[[Json, Json], Recipe],
    tmp_path: Path,
) -> None:
    kind, changes, files, sentence, place = case
    corpus = tmp_path / "corpus"
    for name, content in files.items():
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_bytes(content)
    job_recipe = build_recipe({"type": kind, "path": str(corpus)}, changes)
    assert refuse(spark, job_recipe) == sentence.format(place=place.format(corpus=corpus))


def test_the_source_of_a_mix_and_the_file_of_a_table_are_named(
    spark: SparkSession, build_recipe: Callable[[Json, Json], Recipe], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(chat("a"), chat("b"), chat("c")))
    table = str(tmp_path / "chats")
    refused_row_of_table = with_roles("assistant", "user")
    write_deltalake(table, pa.Table.from_pylist([with_roles("user", "assistant"), refused_row_of_table]))
    sources = [
        {"name": "files", "type": "JSONLines", "path": str(tmp_path / "a.jsonl"), "weight": 1},
        {"name": "table", "type": "Delta", "path": table, "weight": 1},
    ]
    (file,) = (path.name for path in (tmp_path / "chats").glob("*.parquet"))
    assert refuse(spark, build_recipe({"type": "Mix", "sources": sources}, {})) == REFUSED_ROLES.format(
        place=f"row 2 of {file} of the Delta table {table}"
    )


def test_the_line_of_a_row_in_a_file_of_many_blocks(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n\n{}\n" * 1000)
    spark.conf.set("spark.sql.files.maxPartitionBytes", 1000)
    try:
        assert [text_files.find_line(spark, f"file://{file}", {}, row) for row in (1, 2, 3, 2000)] == [
            1,
            3,
            4,
            3000,
        ]
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")


def test_where_the_place_cannot_be_found_the_sentence_has_none(
    spark: SparkSession,
    build_recipe: Callable[[Json, Json], Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(chat("a", IMAGE)))
    monkeypatch.setattr(refused_row, "with_place", lambda frame: frame.select("no such column"))
    job_recipe = build_recipe({"type": "JSONLines", "path": str(tmp_path / "a.jsonl")}, {})
    assert refuse(spark, job_recipe) == REFUSED_PART.format(place="a row")
