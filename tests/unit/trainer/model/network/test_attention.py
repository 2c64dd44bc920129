"""Documents that share a row never see each other, in any model."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.weights import load
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEADS, KEYS, SIZE = 4, 2, 8

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
HEAD_OF_8 = {"head_dim": 8}
# Model type, what differs from SMALL, and whether it gets isolated attention.
MODELS: list[tuple[str, dict[str, Any], bool]] = [
    ("llama", {}, True),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}, True),
    ("qwen2", {}, True),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, True),
    ("qwen3", HEAD_OF_8, True),
    ("mistral", {"sliding_window": 4, **HEAD_OF_8}, True),
    ("phi3", {"sliding_window": 4}, True),
    ("gemma2", {"sliding_window": 4, **HEAD_OF_8, "query_pre_attn_scalar": 8}, False),
    ("gemma3_text", {"sliding_window": 4, **HEAD_OF_8, "query_pre_attn_scalar": 8}, True),
    (
        "granite",
        {
            "logits_scaling": 4.0,
            "attention_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
        True,
    ),
    ("cohere", {"logit_scale": 0.25}, True),
    ("cohere2", {"logit_scale": 0.25, "sliding_window": 4, **HEAD_OF_8}, True),
    ("olmo2", {}, True),
    ("smollm3", {}, True),
    ("gpt_neox", {}, True),
    (
        "deepseek_v3",
        {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        True,
    ),
    ("hyperclovax", {"logits_scaling": 4.0}, True),
    ("nemotron", {}, False),
    ("doge", {}, False),
    ("phimoe", {"sliding_window": 4, "num_local_experts": 4}, False),
    ("recurrent_gemma", {"block_types": ["attention"], "attention_window_size": 64, "lru_width": 32}, False),
]


def names() -> list[str]:
    calls: list[str] = []
    for kind, changes, _ in MODELS:
        tied = "tied" if changes.get("tie_word_embeddings") else ""
        window = "window" if "sliding_window" in changes else ""
        calls.append("-".join(part for part in (kind, tied, window) if part))
    return calls


def tiny(kind: str, changes: dict[str, Any]) -> Any:
    """A configuration of few numbers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SMALL, **changes})


def build_model(config: Any, *, isolated: bool) -> Any:
    """A model of random weights, with the attention that training gives it, or with its own plain arithmetic."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than at the start of a training, so that what is attended to shows.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if isolated:
        attention.isolate(model, card=None, half=False, soft_prompt=False)
    else:
        model.set_attn_implementation("eager")
    return model


def packed() -> pack.Batch:
    """Rows of three documents and padding, of one document, and of one with much padding."""
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, 96, (size,), generator=draw).tolist() for size in (7, 1, 9, 20, 3)]
    return pack.collate(networks.of_documents(*documents), [[0, 1, 2], [3], [4]], pad_id=0)


def masked_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], window: int | None
) -> torch.Tensor:
    """SDPA over all tokens at once, with a mask of blocks."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(document))
    visible = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
    if window is not None:
        visible &= at[:, None] - at[None, :] < window
    flat = [
        states.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for states in (query, key, value)
    ]
    shared = query.shape[1] // key.shape[1]
    flat[1:] = [states.repeat_interleave(shared, dim=1) for states in flat[1:]]
    out = functional.scaled_dot_product_attention(flat[0], flat[1], flat[2], attn_mask=visible, scale=0.3)
    return out[0].transpose(0, 1).reshape(query.shape[0], query.shape[2], query.shape[1], SIZE)


@pytest.mark.parametrize(
    ("rows", "lengths", "keys", "window"),
    [
        (1, [12], HEADS, None),
        (1, [5, 1, 6], HEADS, None),
        (1, [5, 1, 6], KEYS, None),
        (2, [5, 7, 12], KEYS, None),
        (2, [5, 7, 12], 1, 3),
        (2, [12, 2, 10], HEADS, 12),
        (3, [1] * 36, KEYS, 1),
    ],
)
def test_isolated_attention_is_attention_under_a_mask_of_blocks(
    rows: int, lengths: list[int], keys: int, window: int | None
) -> None:
    torch.manual_seed(0)
    states = [
        torch.randn(rows, heads, sum(lengths) // rows, SIZE, requires_grad=True)
        for heads in (HEADS, keys, keys)
    ]
    weights = torch.randn(rows, sum(lengths) // rows, HEADS, SIZE)
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // keys)
    outputs, none = attention.isolated_attention(
        module,
        states[0],
        states[1],
        states[2],
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seqlens=begins,
        max_seqlen=max(lengths),
    )
    assert none is None
    expected = masked_reference(states[0], states[1], states[2], lengths, window)
    torch.testing.assert_close(outputs, expected)
    gradients, expected_gradients = (
        torch.autograd.grad((out * weights).sum(), states) for out in (outputs, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize(("kind", "changes", "chosen"), MODELS, ids=names())
def test_a_packed_row_gives_what_its_documents_give_alone(
    kind: str, changes: dict[str, Any], chosen: bool
) -> None:
    """Trap 13: the fallback's mask of blocks follows from position ids where no attention mask is given."""
    config = tiny(kind, changes)
    batch = packed()
    network = Network(build_model(config, isolated=True), Sft())
    assert (network.base.config._attn_implementation == attention.NAME) == chosen
    hidden = network.compute_hidden_states(batch)
    together = network.head.compute_logits(hidden)
    assert together.dtype == torch.float32
    # Eager attention is the model's own arithmetic, soft caps and all.
    alone = build_model(config, isolated=False)
    ids, begins = batch.input_ids.flatten(), batch.cu_seqlens.tolist()
    parts = [alone(input_ids=ids[begin:end].unsqueeze(0)).logits[0] for begin, end in pairwise(begins)]
    torch.testing.assert_close(together.flatten(0, 1), torch.cat(parts).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "cuda", "half", "soft_prompt", "expected"),
    [
        ("llama", False, False, False, True),
        ("llama", True, True, False, True),
        ("llama", True, False, False, False),
        ("llama", False, False, True, False),
        ("gemma2", False, True, False, False),
    ],
)
def test_what_cannot_be_isolated_keeps_its_own_attention(
    *,
    kind: str,
    cuda: bool,
    half: bool,
    soft_prompt: bool,
    expected: bool,
) -> None:
    card = Card("H100", 80 * 2**30, (9, 0)) if cuda else None
    model = load.build_empty_model(tiny(kind, HEAD_OF_8), torch.float32, trust=False)
    assert attention.isolate(model, card=card, half=half, soft_prompt=soft_prompt) == expected
    name = attention.NAME_ON_GPU if cuda else attention.NAME
    assert (model.config._attn_implementation == name) == expected


# GPT-2 has a name of its own for the dropout of its attention; `resid_pdrop` is not of its weights.
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {**HEAD_OF_8, "attention_dropout": 0.1}, False),
        ("gpt2", {"n_layer": 1, "n_head": 4, "attn_pdrop": 0.1}, False),
        ("gpt2", {"n_layer": 1, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.1}, True),
    ],
)
@pytest.mark.parametrize("objective", ["SFT", "DPO"])
def test_the_kernel_of_gpus_is_for_models_that_train_without_dropout_of_attention(
    tmp_path: Path,
    *,
    kind: str,
    changes: dict[str, Any],
    expected: bool,
    objective: str,
) -> None:
    """DPO takes the dropout out of the base."""
    tiny(kind, changes).save_pretrained(tmp_path)
    recipe = networks.recipe(tmp_path, objective={"type": objective}, precision="BF16")
    with networks.alone() as world:
        on_card = dataclasses.replace(world, card=Card("H100", 80 * 2**30, (9, 0)))
        model = load.build_skeleton(recipe, tmp_path, on_card)
    chosen = model.config._attn_implementation == attention.NAME_ON_GPU
    assert chosen == (expected or objective == "DPO")


# Gemma 4 has layers with heads of two sizes.
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"hidden_size": 48}, False),
        ("llama", {"hidden_size": 64}, True),
        ("llama", {"head_dim": 264}, False),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}, False),
        ("mamba", {}, False),
    ],
)
def test_the_kernel_of_gpus_is_for_heads_that_it_takes(
    kind: str, changes: dict[str, Any], *, expected: bool
) -> None:
    model = load.build_empty_model(tiny(kind, changes), torch.bfloat16, trust=False)
    card = Card("H100", 80 * 2**30, (9, 0))
    assert attention.isolate(model, card=card, half=True, soft_prompt=False) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "objective", "packing", "sentence"),
    [
        (
            "bloom",
            {"n_layer": 2, "n_head": 4},
            "SFT",
            False,
            "model.base BASE is a bloom, which does not accept position ids, so the documents of a row cannot be kept apart: choose "
            "another model",
        ),
        (
            "jamba",
            {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
            "SFT",
            True,
            "model.base BASE is a jamba, whose layers mix the documents of a row: set training.packing to false",
        ),
        (
            "jamba",
            {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
            "DPO",
            False,
            "model.base BASE is a jamba, whose layers mix the documents of a row: choose another model",
        ),
        (
            "gpt_oss",
            {**HEAD_OF_8, "num_local_experts": 4, "num_experts_per_tok": 2},
            "SFT",
            True,
            "model.base BASE is a gpt_oss, whose layers mix the documents of a row: set training.packing to false",
        ),
    ],
)
def test_a_model_that_mixes_documents_is_refused(
    tmp_path: Path, *, kind: str, changes: dict[str, Any], objective: str, packing: bool, sentence: str
) -> None:
    tiny(kind, changes).save_pretrained(tmp_path)
    recipe = networks.recipe(tmp_path, objective={"type": objective}, packing=packing)
    with pytest.raises(RecipeRefusedError) as refused:
        load.build_skeleton(recipe, tmp_path, World(0, 1, 0, 1, torch.device("cpu")))
    assert refused.value.message.replace(str(tmp_path), "BASE") == sentence


def test_documents_do_not_reach_each_other() -> None:
    """What one document says changes nothing of another's, nor does padding."""
    batch = packed()
    network = Network(build_model(tiny("llama", {}), isolated=True), Sft())
    before = network.compute_hidden_states(batch)
    changed = batch.input_ids.clone()
    changed[0, 0] = 95 - changed[0, 0]
    after = network.compute_hidden_states(dataclasses.replace(batch, input_ids=changed))
    differs = (before != after).any(-1)
    assert differs[0, :7].all()
    assert not differs[0, 7:].any()
    assert not differs[1:].any()
