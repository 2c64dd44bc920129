"""Objectives that compare answers train without the dropout of the base, and with that of the adapter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, OPTConfig

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_trainer.train.data import pack
from finetune_trainer.train.objectives.answers import reference_of
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.model.network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    # A layer of OPT ends with a view; nothing changes it in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]
EXAMPLES = 4
HALF = {"attention_dropout": 0.5}
# Dropout in modules of its own, in numbers of the layers, and in those of attention alone.
CONFIGS: dict[str, Any] = {
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "OPT": OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, **HALF),
    "Llama": LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **HALF),
}  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as found:
        yield found


def save(kind: str, base_model: Path, folder: Path) -> Path:
    """A small model whose config has dropout."""
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    config = CONFIGS[kind]
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update({"vocab_size": len(tokenizer), **ids})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def losses(network: Network, batch: pack.Batch) -> list[float]:
    """Those of a training pass, with two seeds."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss, _ = network.train()(batch)
        found.append(loss.item())
    return found


def batch_of(network: Network, objective: str, world: World) -> pack.Batch:
    documents = 2 if objective in COLUMNS_OF_OBJECTIVE else 1
    split = networks.random_split(documents=documents, examples=EXAMPLES)
    batch = pack.collate(split, [[example] for example in range(EXAMPLES)], pad_id=0)
    if not network.objective.has_reference:
        return batch
    return replace(batch, reference=torch.from_numpy(reference_of(network, [batch], world, EXAMPLES)))


@pytest.mark.parametrize(
    ("kind", "objective", "expected"),
    [
        *((kind, "DPO", math.log(2)) for kind in CONFIGS),
        ("GPT-2", "KTO", 0.5),
        ("GPT-2", "ORPO", None),
        ("GPT-2", "SimPO", None),
        ("GPT-2", "SFT", None),
        ("Llama", "SFT", None),
    ],
)
def test_only_sft_drops_out_what_the_base_says(
    *, kind: str, objective: str, expected: float | None, base_model: Path, tmp_path: Path, world: World
) -> None:
    """The reference of DPO and KTO is computed without dropout, and the policy begins as it."""
    base = save(kind, base_model, tmp_path / "base")
    network = networks.build(networks.recipe(base, objective={"type": objective}), base, world)
    first, second = losses(network, batch_of(network, objective, world))
    assert (first == second) == (objective != "SFT")
    if expected is not None:
        assert first == pytest.approx(EXAMPLES * expected, rel=1e-6)
    # What is exported is the base's own.
    assert (
        network.base.config.to_diff_dict() == AutoModelForCausalLM.from_pretrained(base).config.to_diff_dict()
    )


@pytest.mark.parametrize(("method", "dropout"), [("LoRA", 0.5), ("QLoRA", 0.0)])
def test_adapters_drop_out_what_the_recipe_says(
    method: str, dropout: float, base_model: Path, tmp_path: Path, world: World
) -> None:
    base = save("Llama", base_model, tmp_path / "base")
    recipe = networks.recipe(
        base, method={"type": method, "lora": {"dropout": dropout}}, objective={"type": "SimPO"}
    )
    network = networks.build(recipe, base, world)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.ones_like(weight), alpha=0.1)
    first, second = losses(network, batch_of(network, "SimPO", world))
    assert (first == second) == (dropout == 0.0)
