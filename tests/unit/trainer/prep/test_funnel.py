"""Samples of what steps drop: with their texts as the later steps see them, and none with values that are to be replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_trainer.prep.spark import session
from unit.trainer.prep.recipes import Preparer

FRENCH = "Ceci est une phrase en français, que le préparateur ne devrait pas garder pour ses exemples."
TASK = "which of these seven stones did the old king of the white city give away"
SAID = (
    "The table stands beside the window of the hall, and nobody has moved it for years; ask joe@example.org."
)
ROWS = [
    {"question": "short", "answer": "joe@example.org"},
    {"question": FRENCH, "answer": "Écrivez à joe@example.org, s'il vous plaît."},
    {
        "question": f"Please say {TASK}?",
        "answer": "Ask joe@example.org about it, who was there at that time.",
    },
    {"question": SAID, "answer": "so"},
    {"question": SAID.upper(), "answer": "so"},
]


@pytest.fixture
def changes(prepare: Preparer) -> dict[str, Any]:
    """A step of each kind, which drops one of the rows."""
    (prepare.folder / "tasks.jsonl").write_text(json.dumps({"task": TASK}) + "\n", encoding="utf-8")
    tasks = {"name": "tasks", "type": "JSONLines", "path": str(prepare.folder / "tasks.jsonl")}
    return {
        "minChars": 30,
        "languages": ["en"],
        "decontaminate": {"sources": [tasks]},
        "reportSamples": 3,
    }


def test_a_sample_of_each_step_that_drops(prepare: Preparer, changes: dict[str, Any]) -> None:
    result = prepare(ROWS, **changes)
    assert result.dropped == {"notNull": 0, "minChars": 1, "language": 1, "decontaminate": 1, "dedupe": 1}
    (shown,) = prepare.shown
    assert {step: [text.partition("\n")[0] for text in texts] for step, texts in shown.samples.items()} == {
        "minChars": ["short"],
        "language": [FRENCH],
        "decontaminate": ["tasks:"],
        "dedupe": [min(SAID, SAID.upper(), key=lambda text: text not in shown.samples["dedupe"][0])],
    }


@pytest.mark.parametrize(
    ("failures", "again"), [([2, 2], False), ([2, 3], True), ([None, None], True)], ids=str
)
def test_rows_are_counted_again_where_something_failed_meanwhile(
    failures: list[int | None],
    again: bool,
    prepare: Preparer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter(failures)
    monkeypatch.setattr(session, "count_failures", lambda *_: next(answers))
    result = prepare(ROWS, minChars=30)
    assert result.dropped == {"notNull": 0, "minChars": 1, "dedupe": 1}
    assert ("counting the rows again" in capsys.readouterr().out) == again


def test_no_sample_has_a_value_that_is_to_be_replaced(prepare: Preparer, changes: dict[str, Any]) -> None:
    prepare(ROWS, **changes, redact=["Email"])
    (shown,) = prepare.shown
    assert shown.samples.keys() == {"decontaminate", "dedupe"}
    assert "joe@" not in str(shown.samples).lower()
    assert "<EMAIL>" in shown.samples["dedupe"][0]
