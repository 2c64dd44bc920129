"""Objectives that compare answers train without the dropout of the base, and with that of the adapter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PhimoeConfig,
)

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network.attention import has_attention_dropout
from finetune_trainer.train.model.weights import load
from finetune_trainer.train.objectives.answers import compute_reference
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    # A layer of OPT ends with a view; nothing changes it in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]
EXAMPLES = 4
HALF = {"attention_dropout": 0.5}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
MIXTURE = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
# Dropout in modules of its own, in numbers of the layers, and in those of attention alone; noise of routers.
CONFIGS: dict[str, Any] = {
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "OPT": OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, **HALF),
    "Llama": LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **HALF),
    "Mixtral": MixtralConfig(**MIXTURE, router_jitter_noise=0.1),
}  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


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
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss, _ = network.train()(batch)
        values.append(loss.item())
    return values


def batch_of(network: Network, objective: str, world: World) -> pack.Batch:
    documents = 2 if objective in COLUMNS_OF_OBJECTIVE else 1
    split = networks.random_split(documents=documents, examples=EXAMPLES)
    batch = pack.collate(split, [[example] for example in range(EXAMPLES)], pad_id=0)
    if not network.objective.has_reference:
        return batch
    return replace(batch, reference=torch.from_numpy(compute_reference(network, [batch], world, EXAMPLES)))


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


def test_a_model_that_chooses_experts_at_random_is_refused(world: World, tmp_path: Path) -> None:
    PhimoeConfig(**MIXTURE).save_pretrained(tmp_path)
    with pytest.raises(RecipeRefusedError) as refused:
        load.build_skeleton(networks.recipe(tmp_path, objective={"type": "DPO"}), tmp_path, world)
    assert refused.value.message == (
        f"model.base {tmp_path} is a phimoe, which routes tokens to random experts in training, so its answers cannot be compared: choose "
        "another model, or objective SFT"
    )
    load.build_skeleton(networks.recipe(tmp_path), tmp_path, world)


@pytest.mark.parametrize(("method", "dropout"), [("LoRA", 0.5), ("LoRA", None), ("QLoRA", 0.0)])
def test_adapters_drop_out_what_the_recipe_says(
    method: str, dropout: float | None, base_model: Path, tmp_path: Path, world: World
) -> None:
    base = save("Llama", base_model, tmp_path / "base")
    lora = None if dropout is None else {"dropout": dropout}
    recipe = networks.recipe(base, method={"type": method, "lora": lora}, objective={"type": "SimPO"})
    network = networks.build(recipe, base, world)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.ones_like(weight), alpha=0.1)
    first, second = losses(network, batch_of(network, "SimPO", world))
    assert (first == second) == (not dropout)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("gpt2", "attn_pdrop"),
        ("gpt_bigcode", "attn_pdrop"),
        ("gpt_neox", "attention_dropout"),
        ("opt", "attention_dropout"),
        ("llama", "attention_dropout"),
        ("phi", "attention_dropout"),
        ("qwen3", "attention_dropout"),
        ("granite", "attention_dropout"),
        ("stablelm", "attention_dropout"),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_dropout_of_attention_is_what_a_model_asks_an_attention_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, field: str, share: float
) -> None:
    dropouts = []

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        dropouts.append(options.get("dropout", 0.0))
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "asked", attention)
    config = AutoConfig.for_model(kind)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    mlp = {"intermediate_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 32, "num_key_value_heads": 4}
    heads = {"head_dim": 8, "pad_token_id": 0}
    dimensions = {name: value for name, value in {**sizes, **mlp, **heads}.items() if hasattr(config, name)}
    # All other dropout is on.
    unrelated = {name: 0.5 for name in ("resid_pdrop", "dropout", "hidden_dropout") if hasattr(config, name)}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **dimensions, **unrelated, **{field: share}), attn_implementation="asked"
    )
    model.train()(input_ids=torch.ones(1, 5, dtype=torch.long))
    assert dropouts == [share]
    assert has_attention_dropout(model) == (share > 0)
