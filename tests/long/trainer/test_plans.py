"""Plans of large models: a whole step of Llama 3.1 8B and 70B on fake tensors, beside the estimate without a plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.train import graphs, plan
from finetune_trainer.train.runtime.device import Card
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    # What dynamo reads of every tensor, and of what is computed once.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

H100 = Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0))
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SIZES = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


def recipe(config: Path, size: str, *, nodes: int = 1, gpus: int = 1, **changes: Any) -> Recipe:
    (config / "config.json").write_text(json.dumps({**LLAMA, **SIZES[size]}), encoding="utf-8")
    base_recipe = networks.recipe(config, precision="BF16", perDeviceBatchSize=1, maxLength=4096, **changes)
    return base_recipe.model_copy(
        update={
            "distributed": base_recipe.distributed.model_copy(update={"nodes": nodes, "gpus_per_node": gpus})
        }
    )


# Model, method, nodes, GPUs of each, passes of a step, and its collectives: gathers and reductions.
PLANS = {
    "8B Full on 2x8": ("8B", "Full", 2, 8, 1, {"all-gather": 67, "all-reduce": 1, "reduce-scatter": 35}),
    "8B Full on 4 in 2 passes": (
        *("8B", "Full", 1, 4, 2),
        {"all-gather": 134, "all-reduce": 1, "reduce-scatter": 70},
    ),
    "70B QLoRA on 8": ("70B", "QLoRA", 1, 8, 1, {"all-gather": 160, "all-reduce": 1, "reduce-scatter": 80}),
    "8B LoRA on 1": ("8B", "LoRA", 1, 1, 1, {}),
}


@pytest.mark.parametrize("recompute", ["None", "Selective", "Full"])
@pytest.mark.parametrize("case", PLANS)
def test_the_estimate_is_about_what_is_planned(case: str, recompute: str, tmp_path: Path) -> None:
    size, method, nodes, gpus, passes, collectives = PLANS[case]
    planned_recipe = recipe(
        tmp_path,
        size,
        nodes=nodes,
        gpus=gpus,
        method={"type": method},
        activationCheckpointing=recompute,
        gradientAccumulation=passes,
    )
    planned = plan.plan_step(planned_recipe, tmp_path, H100)
    print(*planned.lines(), sep="\n")
    assert planned.step.waits == []
    assert {name: each.count for name, each in planned.step.traffic.items()} == collectives
    assert planned.choice.estimate.total == pytest.approx(planned.step.total, rel=0.15)


@pytest.mark.parametrize("recompute", ["None", "Full"])
@pytest.mark.parametrize("method", ["Full", "LoRA"])
def test_a_kind_of_layer_has_two_graphs_over_packs_of_different_lengths(
    method: str, recompute: str, tmp_path: Path
) -> None:
    """One with the number of documents of the first pack, and one for any number."""
    compiled_recipe = recipe(
        tmp_path, "8B", method={"type": method}, compile=True, activationCheckpointing=recompute
    )
    assert graphs.count_graphs(compiled_recipe, tmp_path, H100) == (2, 1)
