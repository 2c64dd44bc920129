"""Which models can be trained as language models, and which as reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.weights import load
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.reward_models import save_reward_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]
REWARDS: dict[str, Any] = {"type": "RewardModel"}


def skeleton(base: Path, objective: dict[str, Any]) -> PreTrainedModel:
    import torch

    world = World(0, 1, 0, 1, torch.device("cpu"))
    return load.build_skeleton(networks.recipe(base, objective=objective), base, world)


def test_a_language_model_gets_a_score_head(base_model: Path) -> None:
    model = skeleton(base_model, REWARDS)
    layer: Any = task.get_output_layer(model)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert (layer.out_features, model.config.num_labels, task.of_model(model)) == (1, 1, "RewardModel")
    assert task.of_model(skeleton(base_model, {"type": "SFT"})) == "LanguageModel"


def test_models_of_another_task_are_refused(base_model: Path, tmp_path: Path) -> None:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    codegen = CodeGenForCausalLM(CodeGenConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8))
    codegen.save_pretrained(tmp_path / "codegen")
    rewards = save_reward_model(base_model, tmp_path / "rewards")
    classes = save_reward_model(base_model, tmp_path / "classes", labels=3)
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "a reward model": (rewards, {"type": "SFT"}),
        "three labels": (classes, REWARDS),
        "no class": (tmp_path / "codegen", REWARDS),
    }
    sentences = {}
    for name, (folder, objective) in cases.items():
        with pytest.raises(RecipeRefusedError) as refused:
            skeleton(folder, objective)
        sentences[name] = f"{refused.value.reason}: {refused.value.message}".replace(str(folder), "M")
    assert sentences == {
        "a reward model": "ModelNotSupported: model.base M is a sequence classification model, which cannot be trained as a "
        "language model: choose a language model, or set objective.type RewardModel",
        "three labels": "ModelNotSupported: model.base M is a sequence classification model with 3 labels, and a reward model has "
        "one: choose a language model, or a reward model",
        "no class": "ModelNotSupported: model.base M is a codegen, which has no sequence classification model in this version of "
        "transformers: choose another model",
    }


def test_the_score_head_is_no_target_of_an_adapter(base_model: Path) -> None:
    method = {"type": "LoRA", "lora": {"targetModules": ["q_proj", "score"]}}
    recipe = networks.recipe(base_model, objective=REWARDS, method=method)
    with pytest.raises(RecipeRefusedError, match="targetModules score is the score head, which is always"):
        adapt.adapt(skeleton(base_model, REWARDS), recipe.method, "base")
