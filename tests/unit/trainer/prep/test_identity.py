"""The digest of rows: what was read, the tokenizer, and the release."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.prep import identity
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def digest(folder: Path) -> str:
    return identity.digest(recipe(), ["the-table@3"], folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer and the weights of its model."""
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_what_was_read(tokenizer: Path) -> None:
    reads = [["a@1"], ["a@2"], ["a@1", "b@1"], ["b@1", "a@1"], ["a@1b@1"]]
    assert len({identity.digest(recipe(), read, tokenizer) for read in reads}) == len(reads)


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda _: None, False),
    "other weights": (lambda folder: (folder / "model.safetensors").write_text("other"), False),
    "a folder of checkpoints": (lambda folder: (folder / "checkpoint-1").mkdir(), False),
    "another vocabulary": (lambda folder: (folder / "tokenizer.json").write_text("other"), True),
    "a chat template": (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), True),
    "another name": (lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json"), True),
}


@pytest.mark.parametrize(("change", "differs"), CHANGES.values(), ids=CHANGES)
def test_the_tokenizer(tokenizer: Path, change: Callable[[Path], object], differs: bool) -> None:
    before = digest(tokenizer)
    change(tokenizer)
    assert (digest(tokenizer) != before) == differs


def test_the_day_that_a_chat_template_writes(tokenizer: Path) -> None:
    days = [None, date(2026, 11, 24), date(2026, 11, 25)]
    assert len({identity.digest(recipe(), ["the-table@3"], tokenizer, day) for day in days}) == len(days)
    assert identity.digest(recipe(), ["the-table@3"], tokenizer, None) == digest(tokenizer)


def test_another_release(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(tokenizer)
    monkeypatch.setattr(identity, "get_release", lambda: "1.2.0")
    assert digest(tokenizer) != before
