"""The stops of a model are those at which transformers stops with its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.examples.stop_tokens import read_stop_tokens

CONFIG = {"model_type": "llama", "vocab_size": 9}
# What config.json, generation_config.json, and that of an adapter say; None: there is no such file.
STOPS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None, list[int]]] = {
    "a configuration": ({"eos_token_id": 3}, None, None, [3]),
    "a configuration within another": (
        {"model_type": "gemma3", "text_config": {"eos_token_id": [3, 4]}},
        None,
        None,
        [3, 4],
    ),
    "a default of the family": ({}, None, None, [2]),
    "a generation config": ({"eos_token_id": 3}, {"eos_token_id": [5, 6]}, None, [5, 6]),
    "a generation config without an end": ({"eos_token_id": 3}, {"top_k": 5}, None, []),
    "that of an adapter": ({"eos_token_id": 3}, {"eos_token_id": 5}, {"eos_token_id": 7}, [7]),
}


@pytest.mark.parametrize("case", STOPS)
def test_stops_are_those_of_the_files(case: str, tmp_path: Path) -> None:
    config, generation, adapter, expected = STOPS[case]
    for name, content in (
        ("base/config.json", CONFIG | config),
        ("base/generation_config.json", generation),
        ("adapter/generation_config.json", adapter),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_stop_tokens(tmp_path / "base", tmp_path / "adapter") == expected
