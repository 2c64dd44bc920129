"""Contents that are lists of parts, in the formats in which people bring them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.pod import exit_status
from unit.trainer.prep.recipes import Compared, Comparing, Preparer, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
# The rows of the source that is replaced.
NOT_READ: list[Json] = [{"question": "?"}]


def text(value: str) -> Json:
    return {"type": "text", "text": value}


def chat(number: int, content: Any, answer: Any = "Yes.") -> Json:
    return {
        "messages": [
            {"role": "system", "content": f"Hall {number}."},
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
    }


PARTS = [chat(1, [text("Is it"), text("red?")], [text("Yes.")]), chat(2, [text("And blue?")], [text("No.")])]
MIXED = [
    chat(1, [text("Is it"), text("red?")]),
    chat(2, "[And blue?]", "No."),
    chat(3, ["Or", "green?"], "No."),
]
IMAGE = chat(
    4, [text("What is it?"), {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
)
SOLD = [
    ["Hall 1.", "Is it\nred?", "Yes."],
    ["Hall 2.", "[And blue?]", "No."],
    ["Hall 3.", "Or\ngreen?", "No."],
]
BOTH = [["Hall 1.", "Is it\nred?", "Yes."], ["Hall 2.", "And blue?", "No."]]


def save_lines(rows: list[Json], folder: Path) -> Json:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "JSONLines", "path": str(path)}


def save_text(rows: list[Json], folder: Path) -> Json:
    return save_parquet([{"messages": json.dumps(row["messages"])} for row in rows], folder)


def save_parquet(rows: list[Json], folder: Path) -> Json:
    path = folder / "rows.parquet"
    # A field that some messages or parts have is null in the others; contents are of one type.
    lists = [
        {
            "messages": [
                turn if isinstance(turn["content"], list) else turn | {"content": [text(turn["content"])]}
                for turn in row["messages"]
            ]
        }
        if isinstance(row["messages"], list)
        else row
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(lists), path)
    return {"type": "Parquet", "path": str(path)}


# How rows are saved, the rows, and the contents of their messages. What has a part that is no text is dropped.
FORMATS: dict[str, tuple[Callable[[list[Json], Path], Json], list[Json], list[list[str]]]] = {
    "JSON lines": (save_lines, [*PARTS, IMAGE], BOTH),
    "JSON lines of texts and lists": (save_lines, MIXED, SOLD),
    "JSON text": (save_text, [*MIXED, IMAGE], SOLD),
    "Parquet": (save_parquet, [*PARTS, IMAGE], BOTH),
}


def options(source: Json, **changes: Any) -> Json:
    return {
        "source": source,
        "columns": {"type": "Messages"},
        "dedupe": {"exact": False},
        **changes,
    }


@pytest.mark.parametrize("case", FORMATS)
def test_the_texts_of_parts_are_joined_and_other_parts_are_dropped(
    case: str, prepare: Preparer, tmp_path: Path
) -> None:
    save, rows, expected = FORMATS[case]
    result = prepare(NOT_READ, **options(save(rows, tmp_path), onTemplateError="Drop"))
    contents = [[turn["content"] for turn in row["messages"]] for row in table_of(result)]
    assert sorted(contents) == expected
    assert result.dropped == {"notNull": 0, "onTemplateError": rows.count(IMAGE)}


SHARED = [
    {"conversations": [{"from": "human", "value": f"Is it {color}?"}, {"from": "gpt", "value": "Yes."}]}
    for color in ("red", "blue")
]


def test_files_of_several_formats_in_one_folder(prepare: Preparer, tmp_path: Path) -> None:
    """The column of both has the fields of both; a content may be one part too."""
    tables = [
        [{"messages": SHARED[0]["conversations"]}],
        [chat(1, text("Is it green?"))],
    ]
    for number, rows in enumerate(tables):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        table = pa.Table.from_pylist(
            [
                {
                    "messages": [
                        turn if "from" in turn else turn | {"content": part(turn["content"])}
                        for turn in row["messages"]
                    ]
                }
                for row in rows
            ]
        )
        pq.write_table(table, tmp_path / "corpus" / f"{number}.parquet")
    result = prepare(NOT_READ, **options({"type": "Parquet", "path": str(tmp_path / "corpus")}))
    contents = [[turn["content"] for turn in row["messages"]] for row in table_of(result)]
    assert sorted(contents) == [["Hall 1.", "Is it green?", "Yes."], ["Is it red?", "Yes."]]


def part(content: Any) -> Json:
    """A content as one part."""
    return text(content) if isinstance(content, str) else dict(content)


def test_an_evaluation_set_may_have_parts_and_names_of_other_formats(
    compare: Comparing, tmp_path: Path
) -> None:
    words = "what is the color of the large house beside the old river in this town"
    shared = [{"conversations": [{"from": "human", "value": words}, {"from": "gpt", "value": "Red."}]}]
    image = {"type": "image_url", "text": None}
    evaluation_rows = [{"messages": [{"role": "user", "content": [image, text(f"{words} now")]}]}]
    sources = []
    for name, rows in {"shared": shared, "parts": evaluation_rows}.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        sources.append({"name": name, "type": "Parquet", "path": str(tmp_path / f"{name}.parquet")})
    (tmp_path / "lines").mkdir()
    sources.append({"name": "lines", **save_lines(evaluation_rows, tmp_path / "lines")})
    compared = compare(sources, {"a task": f"Tell me: {words}?", "another": "And another question?"})
    assert compared == Compared(["another"], {"shared": 1, "parts": 1, "lines": 1})


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_of_sharegpt(as_text: bool, prepare: Preparer, tmp_path: Path) -> None:
    rows = [{"conversations": json.dumps(row["conversations"])} for row in SHARED] if as_text else SHARED
    columns = {"type": "Messages", "messages": "conversations"} if as_text else None
    result = prepare(NOT_READ, **options(save_lines(rows, tmp_path), columns=columns))
    assert result.columns
    assert result.columns.messages == "conversations"
    conversations = [
        [(turn["role"], turn["content"]) for turn in row["messages"]] for row in table_of(result)
    ]
    assert sorted(conversations) == [
        [("user", f"Is it {color}?"), ("assistant", "Yes.")] for color in ("blue", "red")
    ]
    assert all(any(row["loss_mask"]) for row in table_of(result))


def test_a_corpus_of_which_nothing_is_learned_is_refused(prepare: Preparer, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Is it red?"}, {"role": "bot", "content": "Yes."}]}]
    with pytest.raises(exit_status.DataError) as refused:
        prepare(NOT_READ, **options(save_lines(rows, tmp_path)))
    assert refused.value.reason == "NothingLearned"
    assert "none in the 1 examples of " in str(refused.value)


def test_a_part_that_is_no_text_is_refused(prepare: Preparer, tmp_path: Path) -> None:
    """JSON lines are in test_refused_row."""
    with pytest.raises(exit_status.DataError) as refused:
        prepare(NOT_READ, **options(save_parquet([*PARTS, IMAGE], tmp_path)))
    assert "message 2 has a part of type image_url, but only text parts can be trained on" in str(
        refused.value
    )
