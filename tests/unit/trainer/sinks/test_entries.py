"""Entries and settings survive their way through a pipe."""

from __future__ import annotations

import pytest

from finetune_trainer.sinks.entries import (
    End,
    Entry,
    Metrics,
    Parameters,
    Settings,
    Start,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "entry",
    [
        Start(3),
        Parameters({"name": "a\nb", "modules": ["q"], "nothing": None}),
        Metrics(2, 1.5, {"loss": 0.1}),
        Metrics(2, 1.5, {"accuracy": 1.0}, is_result=True),
        End(1),
    ],
)
def test_an_entry_is_one_line(entry: Entry) -> None:
    line = encode(entry)
    assert "\n" not in line
    assert decode(line) == entry


def test_settings_are_one_line() -> None:
    settings = Settings(
        "WandB", "support", "uid", "tune", "attempt-1", entity="team", has_system_metrics=True
    )
    assert Settings.decode(settings.encode()) == settings
