"""Numbers and other values that are no text: preparations and splits that are read directly make the same text of them."""

from __future__ import annotations

import json
import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.data import Splits
from finetune_trainer.examples import column_values
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.source import files, reader
from finetune_trainer.prep.steps import conversations
from finetune_trainer.train.data import read
from unit.trainer.prep.recipes import recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from unit.trainer.prep.recipes import Preparer

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
# Columns of Parquet, and the texts of their values.
PARQUET: dict[str, tuple[pa.Array, list[str | None]]] = {
    "int32": (pa.array([12500000, -18, 0], pa.int32()), ["12500000", "-18", "0"]),
    "int64": (pa.array([2**62, None]), ["4611686018427387904", None]),
    "double": (
        pa.array([12500000.0, 18.0, 0.0005, 0.1, -1.5e-7, 123456.789, 1e22, 2e23, 1 / 3, 2.5e-300, -0.0]),
        [
            "12500000",
            "18",
            "0.0005",
            "0.1",
            "-0.00000015",
            "123456.789",
            "1" + "0" * 22,
            "2" + "0" * 23,
            "0.3333333333333333",
            "0." + "0" * 299 + "25",
            "-0",
        ],
    ),
    "no numbers": (pa.array([float("nan"), float("inf"), float("-inf"), None]), [None] * 4),
    "float": (
        pa.array([0.1, 18.0, 16777216.0, 3.4e38, 1 / 3], pa.float32()),
        ["0.1", "18", "16777216", "34" + "0" * 37, "0.33333334"],
    ),
    "decimal": (
        pa.array([Decimal("18.00"), Decimal("0.0000000001")], pa.decimal128(20, 10)),
        ["18.0000000000", "0.0000000001"],
    ),
    "boolean": (pa.array([True, False]), ["true", "false"]),
    "date": (pa.array([date(2024, 5, 1)]), ["2024-05-01"]),
    "time": (
        pa.array([NOON, NOON.replace(microsecond=500_000)], pa.timestamp("us", "UTC")),
        ["2024-05-01 12:00:00", "2024-05-01 12:00:00.5"],
    ),
}
# Numbers of JSON lines, and what is learned of them where it is not the number as it is written.
JSON = ["12500000", "18.0", "18", "0.0005", "1e3", "1.25E7", "-7.50", "123456789012345678901", "1e400"]
NO_NUMBERS = ["NaN", "null"]


def prepared_texts(spark: SparkSession, kind: str, folder: Path) -> dict[str, list[str | None]]:
    frame = files.frame(spark, kind, [str(folder)])
    names = [name for name in frame.columns if not plain_text.is_written(name)]
    table = plain_text.with_texts(frame, names).select(*names).toArrow()
    return {name: table.column(name).to_pylist() for name in names}


def direct_texts(kind: str, folder: Path, names: list[str]) -> dict[str, list[Any]]:
    splits = Splits.model_validate({"type": kind, "train": str(folder)})
    (batch,) = read.read(splits, "train", names, may_be_null=names)
    return batch


def test_values_of_parquet(spark: SparkSession, tmp_path: Path) -> None:
    length = max(len(values) for values, _ in PARQUET.values())
    rows = {
        name: values.to_pylist() + [None] * (length - len(values)) for name, (values, _) in PARQUET.items()
    }
    columns = {name: pa.array(rows[name], values.type) for name, (values, _) in PARQUET.items()}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    expected = {name: texts + [None] * (length - len(texts)) for name, (_, texts) in PARQUET.items()}
    assert prepared_texts(spark, "Parquet", tmp_path) == expected
    assert direct_texts("Parquet", tmp_path, [*PARQUET]) == expected


def test_any_double_reads_back(spark: SparkSession, tmp_path: Path) -> None:
    chance = random.Random(0)  # noqa: S311 - no secret
    bits = (struct.unpack("<d", chance.randbytes(8))[0] for _ in range(500))
    doubles = [*(value for value in bits if value == value), *(chance.random() for _ in range(500))]  # noqa: PLR0124 - NaN
    pq.write_table(pa.table({"double": doubles}), tmp_path / "a.parquet")
    (texts,) = prepared_texts(spark, "Parquet", tmp_path).values()
    assert [float(text or "") for text in texts] == doubles
    direct = direct_texts("Parquet", tmp_path, ["double"])["double"]
    assert [len(text or "") for text in texts] == [len(text or "") for text in direct]


def test_numbers_of_json_lines(spark: SparkSession, tmp_path: Path) -> None:
    lines = [f'{{"text": {value}, "id": {number}}}' for number, value in enumerate([*JSON, *NO_NUMBERS])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    expected = {"text": [*JSON, None, None], "id": [str(number) for number in range(len(lines))]}
    prepared = prepared_texts(spark, "JSONLines", tmp_path)
    assert {name: prepared[name] for name in expected} == expected
    assert direct_texts("JSONLines", tmp_path, ["text", "id"]) == expected


# Contents of messages in JSON lines: as they are written.
CONTENTS = ["18", "18.0", "12500000.0", "1.25e7", "0.0005", "true"]
# Messages with a content, by their format; all of them say the same.
FORMATS: dict[str, Callable[[str], str]] = {
    "OpenAI": lambda content: f'"role": "user", "content": {content}',
    "ShareGPT": lambda content: f'"from": "human", "value": {content}',
    "parts": lambda content: f'"role": "user", "content": [{{"type": "text", "text": {content}}}]',
    "one part": lambda content: f'"role": "user", "content": {{"type": "text", "text": {content}}}',
    "texts": lambda content: f'"role": "user", "content": [{content}]',
}
# Arguments of calls in the rows of one file; the second text in a pair has no key without a value.
ARGUMENTS = {
    '{"n": 18, "unit": null}': '{"n": 18}',
    '{"n": 0.0005, "unit": "m"}': '{"n": 0.0005, "unit": "m"}',
    '{"n": 12500000}': '{"n": 12500000}',
    '{"n": 1.5, "m": {"z": 1, "a": [1, 0.5]}}': '{"n": 1.5, "m": {"z": 1, "a": [1, 0.5]}}',
    '{"n": "1.5"}': '{"n": "1.5"}',
    '{"n": 123456789012345678901}': '{"n": 123456789012345678901}',
}


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_in_messages(name: str, spark: SparkSession, tmp_path: Path) -> None:
    """An integer in a call gets no point because another row has one, and a key without a value is left out."""
    lines = [
        f'{{"messages": [{{{FORMATS[name](content)}}}, {{{FORMATS[name](quote("[1.5]"))}, '
        f'"tool_calls": [{{"name": "f", "arguments": {arguments}}}]}}]}}'
        for content, arguments in zip(CONTENTS, ARGUMENTS, strict=True)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    expected = [
        [content, "[1.5]", f'[{{"name": "f", "arguments": {arguments}}}]']
        for content, arguments in zip(CONTENTS, ARGUMENTS.values(), strict=True)
    ]
    frame = files.frame(spark, "JSONLines", [str(tmp_path)])
    form = build_plan(recipe(columns={"type": "Messages"}), reader.find_conversations(frame)).form
    prepared = [row.asDict(recursive=True)["messages"] for row in conversations.parse(frame, form).collect()]
    direct = direct_texts("JSONLines", tmp_path, ["messages"])["messages"]
    for values in (prepared, direct):
        made = [column_values.parse_conversation(value, "messages") for value in values]
        assert [
            [first["content"], second["content"], json.dumps(second["tool_calls"])] for first, second in made
        ] == expected
    calls = [messages[1]["tool_calls"] for messages in prepared]
    assert ['"n":12500000}' in calls[2], "0.0005" in calls[1], "1.5" in calls[3]] == [True] * 3


def quote(text: str) -> str:
    return json.dumps(text)


NUMBER = pa.struct(
    [
        ("double", pa.float64()),
        ("float", pa.float32()),
        ("decimal", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("map", pa.map_(pa.string(), pa.float64())),
        ("length", pa.duration("ms")),
        ("times", pa.list_(pa.timestamp("ns", "UTC"))),
        ("a time", pa.map_(pa.string(), pa.timestamp("ns"))),
    ]
)
# Arguments of calls in Parquet, and what is learned of them.
STRUCTURES: list[tuple[dict[str, Any] | None, str]] = [
    (
        {"double": 18.0, "float": 0.1, "decimal": Decimal("1.50")},
        '{"double": 18, "float": 0.1, "decimal": 1.5}',
    ),
    ({"double": 12500000.0, "day": date(2024, 5, 1)}, '{"double": 12500000, "day": "2024-05-01"}'),
    ({"double": 0.0005, "float": float("nan")}, '{"double": 0.0005}'),
    ({"length": timedelta(seconds=2)}, '{"length": 2000}'),
    (
        {"times": [1_714_564_800_500_000_001, None], "a time": {"a": 1_714_564_800_000_000_001}},
        '{"times": ["2024-05-01 12:00:00.5", null], "a time": {"a": "2024-05-01 12:00:00"}}',
    ),
    (
        {"double": 1e22, "map": {"a": 2.0, "b": 0.5}},
        '{"double": 1' + "0" * 22 + ', "map": {"a": 2, "b": 0.5}}',
    ),
]


def test_numbers_in_structures_of_parquet(spark: SparkSession, tmp_path: Path) -> None:
    call = pa.struct([("name", pa.string()), ("arguments", NUMBER)])
    turn = pa.struct([("role", pa.string()), ("content", pa.float32()), ("tool_calls", pa.list_(call))])
    rows = [
        [
            {"role": "user", "content": 0.1},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": one}]},
        ]
        for one, _ in STRUCTURES
    ]
    tools = [[{"name": "f", "arguments": one}] for one, _ in STRUCTURES]
    columns = {"messages": pa.array(rows, pa.list_(turn)), "tools": pa.array(tools, pa.list_(call))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    frame = files.frame(spark, "Parquet", [str(tmp_path / "a.parquet")])
    form = build_plan(
        recipe(columns={"type": "Messages", "tools": "tools"}), reader.find_conversations(frame)
    ).form
    prepared = conversations.with_tools(conversations.parse(frame, form), form).collect()
    direct = direct_texts("Parquet", tmp_path, ["messages", "tools"])
    expected = [f'[{{"name": "f", "arguments": {text}}}]' for _, text in STRUCTURES]
    for messages, tools_of_rows in (
        ([row.asDict(recursive=True)["messages"] for row in prepared], [row["tools"] for row in prepared]),
        (direct["messages"], direct["tools"]),
    ):
        made = [column_values.parse_conversation(value, "messages") for value in messages]
        assert [turns[0]["content"] for turns in made] == ["0.1"] * len(rows)
        assert [json.dumps(turns[1]["tool_calls"]) for turns in made] == expected
        assert [json.dumps(column_values.parse_tools(value, "tools")) for value in tools_of_rows] == expected


# Definitions of tools in the rows of one file of JSON lines, and what is learned of them.
DEFINITIONS = {
    '[{"name": "f", "minimum": 0, "default": 5, "z": 1, "a": [null]}]': '[{"name": "f", "minimum": 0, "default": 5, "z": 1, "a": [null]}]',
    '[{"name": "f", "minimum": 0.5, "default": "5", "last": null}]': '[{"name": "f", "minimum": 0.5, "default": "5"}]',
    '[{"first": null, "name": "\\"null\\": null", "default": null }, {"a":null,"b" : null}]': '[{"name": "\\"null\\": null"}, {}]',
    "null": "null",
}


def test_numbers_in_tools(spark: SparkSession, tmp_path: Path) -> None:
    """A number is no text because another row has one, and keys keep their order."""
    (tmp_path / "a.jsonl").write_text(
        "\n".join(f'{{"text": "a", "tools": {tools}}}' for tools in DEFINITIONS)
    )
    frame = files.frame(spark, "JSONLines", [str(tmp_path)])
    prepared = frame.select(conversations.tools(frame, "tools").alias("tools"))
    direct = direct_texts("JSONLines", tmp_path, ["tools"])["tools"]
    for values in ([row["tools"] for row in prepared.collect()], direct):
        made = [json.dumps(column_values.parse_tools(value, "tools")) for value in values]
        assert made == [*DEFINITIONS.values()]


def answers(made: Any) -> dict[str, str]:
    return {row["prompt"]: row["response"] for row in table_of(made)}


def test_answers_are_numbers(prepare: Preparer, tmp_path: Path) -> None:
    """The filter still compares numbers, and a template in Jinja still computes with them."""
    rows = [
        {"question": f"q{number}", "answer": value} for number, value in enumerate([1.25e7, 18.0, 5e-4, -1.0])
    ]
    assert answers(prepare(rows, filter="answer > 0")) == {"q0": "12500000", "q1": "18", "q2": "0.0005"}
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(f'{{"question": "q{n}", "answer": {n}.50}}' for n in (9, 10)))
    of_lines = {"type": "JSONLines", "path": str(lines)}
    assert answers(prepare([], source=of_lines, filter="answer > 10")) == {"q10": "10.50"}
    jinja: dict[str, Any] = {
        "promptTemplate": "{{ question }}{{ answer * 2 }}",
        "responseTemplate": "{{ answer }}",
    }
    made = prepare([], source=of_lines, templateSyntax="Jinja", **jinja)
    assert answers(made) == {"q919": "9.5", "q1021": "10.5"}


def test_answers_of_a_mix_that_are_numbers_in_one_source(prepare: Preparer, tmp_path: Path) -> None:
    lines = {"a": '{"question": "qa", "answer": 7.50}', "b": '{"question": "qb", "answer": "eight"}'}
    for name, line in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(line)
    parts = [{"name": name, "type": "JSONLines", "path": str(tmp_path / f"{name}.jsonl")} for name in lines]
    assert answers(prepare([], source={"type": "Mix", "sources": parts})) == {"qa": "7.50", "qb": "eight"}
