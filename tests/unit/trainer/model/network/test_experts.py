"""The numbers of experts are found under the names of each model's config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    GPT2Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from finetune_trainer.train.model.network import experts

SMALL = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


# The config, and of a layer: its experts, those of a token, and the numbers of a token between their products.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SMALL), (0, 0, 64)),
        (GPT2Config(n_embd=16), (0, 0, 4 * 16)),
        (MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2), (8, 2, 2 * 64)),
        (
            Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=8),
            (8, 4, 4 * 8),
        ),
        (
            Qwen2MoeConfig(
                **SMALL,
                num_experts=8,
                num_experts_per_tok=4,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=24,
            ),
            (8, 4, 4 * 8 + 24),
        ),
        (
            DeepseekV3Config(
                **SMALL,
                n_routed_experts=8,
                num_experts_per_tok=4,
                moe_intermediate_size=8,
                n_shared_experts=2,
            ),
            (8, 4, 6 * 8),
        ),
        (
            Ernie4_5_MoeConfig(
                **SMALL, moe_num_experts=8, moe_k=4, moe_intermediate_size=8, moe_num_shared_experts=1
            ),
            (8, 4, 5 * 8),
        ),
        (
            Gemma4TextConfig(**SMALL, num_experts=8, top_k_experts=4, moe_intermediate_size=8),
            (8, 4, 4 * 8 + 64),
        ),
        (Llama4TextConfig(**SMALL, num_local_experts=8, num_experts_per_tok=1), (8, 1, 2 * 64)),
        (HunYuanMoEV1Config(**SMALL, num_experts=8, moe_topk=[2, 4]), (8, 4, 5 * 64)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, tuple) else "",
)
def test_experts_are_counted(config: Any, expected: tuple[int, int, int]) -> None:
    sizes = experts.field_reader(config)
    assert (
        experts.count_per_layer(sizes),
        experts.count_per_token(sizes),
        experts.compute_feed_forward_width(sizes),
    ) == expected
