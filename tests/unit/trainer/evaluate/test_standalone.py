"""A version as one folder for a command of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.evaluate import standalone
from finetune_trainer.pod.exit_status import RecipeRefusedError
from support import networks
from support.cells import WARNINGS
from support.evaluations import save_adapter

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
TOKENS = torch.arange(2, 30)[None]


def test_an_adapter_is_merged_into_its_base(base_model: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, folder = save_adapter(base_model, tmp_path / "adapter"), tmp_path / "model"
    (folder / ".fetched").mkdir(parents=True)
    for name in ("notes.txt", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("of another attempt")
    standalone.write(networks.recipe(base_model, method={"type": "LoRA"}), str(adapter), folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
        expected = AutoPeftModelForCausalLM.from_pretrained(adapter)(TOKENS).logits
    torch.testing.assert_close(logits, expected)
    assert (
        AutoTokenizer.from_pretrained(folder).vocab_size
        == AutoTokenizer.from_pretrained(base_model).vocab_size
    )


def test_a_whole_model_on_a_volume_is_copied(base_model: Path, tmp_path: Path) -> None:
    standalone.write(networks.recipe(base_model), str(base_model), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        base_model / "model.safetensors"
    ).read_bytes()


def test_virtual_tokens_are_refused(base_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base_model, tmp_path / "adapter", "PromptTuning")
    with pytest.raises(
        RecipeRefusedError, match="is a PROMPT_TUNING adapter, which cannot be merged into its base"
    ):
        standalone.write(networks.recipe(base_model), str(adapter), tmp_path / "model")
