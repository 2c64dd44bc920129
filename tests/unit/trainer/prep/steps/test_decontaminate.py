"""Decontamination in a whole preparation: which examples are dropped for which evaluation set, and what is recorded."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from finetune_trainer.pod.exit_status import DataError
from unit.trainer.prep.recipes import Compared, Comparing, Preparer, table_of

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]
CHANCE = random.Random(11)  # noqa: S311
TASKS = [" ".join(f"w{CHANCE.randrange(10_000)}" for _ in range(20)) for _ in range(6)]
SYSTEM = "you are a helpful assistant of the company and answer in short sentences without any jokes"
SHORT = "the capital of the old kingdom is white stone"  # nine words


def row(question: str, answer: str = "so") -> Json:
    return {"question": question, "answer": answer}


def part(task: str, words: int, start: int = 2) -> str:
    return " ".join(task.split()[start : start + words])


# An example, and whether it is dropped.
EXAMPLES: dict[str, tuple[Json, bool]] = {
    "a whole task, in other case": (row(f"Solve: {TASKS[0].upper()}"), True),
    "13 words of a task": (row("no", f"before {part(TASKS[1], 13)}, after"), True),
    "12 words of a task": (row(f"before {part(TASKS[1], 12)} after"), False),
    "a task that begins in the prompt and ends in the answer": (
        row(part(TASKS[2], 10, 0), part(TASKS[2], 10, 10)),
        True,
    ),
    "a short task, whole": (row(f"Is it so that {SHORT}?"), True),
    "a part of a short task": (row(f"Is it so that {SHORT.rpartition(' ')[0]}?"), False),
    "an answer that is too short to be compared": (row("six words are not enough here", "42"), False),
    "words of two tasks": (row(f"{part(TASKS[3], 8)} {part(TASKS[4], 8)}"), False),
    "nothing of a task": (
        row("what is in the table beside the window of the hall over there in the evening"),
        False,
    ),
}
ROWS = [example for example, _ in EXAMPLES.values()]


@pytest.fixture
def sets(tmp_path: Path) -> list[Json]:
    """A Delta table with tasks, and JSON lines with a short one in a list, and a long one in a conversation."""
    tasks = [{"task": task, "answer": "42", "number": n} for n, task in enumerate(TASKS)]
    write_deltalake(tmp_path / "tasks", pa.Table.from_pylist(tasks))
    write_deltalake(tmp_path / "tasks", pa.Table.from_pylist(tasks[:1]), mode="overwrite")
    chat = [{"role": "user", "content": TASKS[0]}, {"role": "assistant", "content": None}]
    (tmp_path / "short.jsonl").write_text(
        json.dumps({"choices": ["yes", SHORT, None], "chat": chat}) + "\n{}\n"
    )
    return [
        {
            "name": "tasks",
            "type": "Delta",
            "path": str(tmp_path / "tasks"),
            "version": 0,
            "columns": ["task"],
        },
        {"name": "short", "type": "JSONLines", "path": str(tmp_path / "short.jsonl")},
    ]


def test_examples_that_share_a_run_of_words_are_dropped(
    prepare: Preparer, sets: list[Json], capsys: pytest.CaptureFixture[str]
) -> None:
    result = prepare(ROWS, decontaminate={"sources": sets})
    clean = [example["question"] for example, dropped in EXAMPLES.values() if not dropped]
    assert sorted(row["prompt"] for row in table_of(result)) == sorted(clean)
    assert result.dropped == {"notNull": 0, "decontaminate": 4, "dedupe": 0}
    assert [evaluation_set.to_json() for evaluation_set in result.evaluation_sets or []] == [
        {"name": "tasks", "examples": 3, "version": 0},
        {"name": "short", "examples": 2},
    ]
    output = capsys.readouterr().out
    assert f"evaluation set tasks: {sets[0]['path']} version 0, columns task\n" in output
    assert f"evaluation set short: {sets[1]['path']}, columns chat, choices\n" in output


def test_it_comes_behind_redaction_and_before_duplicates(prepare: Preparer, tmp_path: Path) -> None:
    """Of two examples with one prompt, the one that shares no words with a set stays, whichever is the first."""
    task = "write a letter to jane@example.com and tell her of the new house by the lake"
    pq.write_table(pa.Table.from_pylist([{"text": task}]), tmp_path / "set.parquet")
    source = {"name": "letters", "type": "Parquet", "path": str(tmp_path / "set.parquet")}
    rows = [row("one", f"{task} {end}") for end in ("a", "b", "c")] + [row("one", "clean"), row("two", task)]
    result = prepare(
        rows,
        redact=["Email"],
        dedupe={"columns": ["question"], "exact": True},
        decontaminate={"sources": [source]},
    )
    assert result.dropped == {"notNull": 0, "decontaminate": 4, "dedupe": 0}
    assert [row["response"] for row in table_of(result)] == ["clean"]


def test_conversations_are_compared_without_their_roles(prepare: Preparer, sets: list[Json]) -> None:
    turns = [part(TASKS[5], 7, 0), part(TASKS[5], 7, 7)]
    chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]
    clean = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    result = prepare(
        [{"chat": chat}, {"chat": clean}],
        columns={"type": "Messages", "messages": "chat"},
        decontaminate={"sources": sets[:1]},
        dedupe={"near": {}},
    )
    assert result.dropped == {"notNull": 0, "decontaminate": 1, "dedupe": 0, "near": 0}
    assert [row["messages"] for row in table_of(result)] == [clean]


def test_what_the_texts_of_a_set_share_is_no_task(compare: Comparing, tmp_path: Path) -> None:
    """Each text begins with the instruction of a template, and conversations have a system prompt."""
    instruction = (
        "below is an instruction that describes a task so write a response that completes the request"
    )
    # A message has its role in either field, also where the set has both.
    system = [{"role": "system", "content": SYSTEM}, {"from": "system", "content": SYSTEM}]
    tasks = [{"text": f"{instruction} {task}", "chat": system} for task in TASKS]
    pq.write_table(pa.Table.from_pylist(tasks), tmp_path / "set.parquet")
    source = {"name": "tasks", "type": "Parquet", "path": str(tmp_path / "set.parquet")}
    examples = {f"other task {number}": f"{instruction} {SYSTEM} say {number}" for number in range(3)}
    compared = compare([source], {**examples, "a task": f"{instruction} {TASKS[0]}"})
    assert compared == Compared([*examples], {"tasks": 1})


# Changes to the first set, the reason and the sentence; {path} is its table.
REFUSED: dict[str, tuple[Json, str, str]] = {
    "a set that is not there": (
        {"path": "/nowhere", "version": None},
        "MissingSource",
        "data.prepare.decontaminate.sources[tasks].path /nowhere is not a Delta table: correct the path, or set another type",
    ),
    "a column that is not there": (
        {"columns": ["tusk"]},
        "MissingColumn",
        "{path} has no column tusk: it has answer, number and task",
    ),
    "a column of numbers": (
        {"columns": ["number"]},
        "WrongColumnType",
        "column number of the evaluation set tasks holds bigint: name columns with texts, lists of texts, or lists of {{role, "
        "content}}",
    ),
    "texts that are too short": (
        {"columns": ["answer"]},
        "NothingToCompare",
        "the evaluation set tasks, {path}, has no text of 8 words or more in answer: name its text columns in "
        "data.prepare.decontaminate.sources, or lower minWords",
    ),
}


@pytest.mark.parametrize(("changes", "reason", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_set_that_cannot_be_compared_is_refused(
    compare: Comparing, sets: list[Json], changes: Json, reason: str, sentence: str
) -> None:
    with pytest.raises(DataError) as refused:
        compare([sets[0] | changes], {"a": SHORT})
    assert (refused.value.reason, refused.value.message) == (reason, sentence.format(path=sets[0]["path"]))
