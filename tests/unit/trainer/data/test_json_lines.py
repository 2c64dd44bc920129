"""Rows of a split in files of JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from finetune_crds.data import Splits
from finetune_trainer.examples.columns import Column
from finetune_trainer.train.data import read

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_the_first_rows_of_json_lines_are_their_schema(tmp_path: Path) -> None:
    """The first file is empty, and the first row lacks columns that others have."""
    (tmp_path / "0.jsonl").touch()
    rows = [
        {"messages": [], "text": None, "tags": ["a"]},
        {"messages": CHAT, "text": "hi", "tags": ["a"], "split": "train", "score": 1},
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = Splits(type="JSONLines", train=str(tmp_path))
    assert read.read_schema(splits) == [
        Column("messages", "messages", "list"),
        Column("text", "text", "str"),
        Column("tags", "other", "list"),
        Column("split", "text", "str"),
        Column("score", "label", "int"),
    ]
