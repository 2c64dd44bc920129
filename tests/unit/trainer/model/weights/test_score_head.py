"""The score head of a reward model: new for a language model, and that of the base or of the adapter otherwise."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.evaluate import standalone
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models import download
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.adapters import continued
from finetune_trainer.train.model.weights import merge, score_head
from finetune_trainer.train.objectives import reward
from support import networks
from support.evaluations import save_adapter
from support.reward_models import load_reward_adapter, save_reward_adapter, save_reward_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]
REWARDS = {"type": "RewardModel"}
PAD = 1


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


def compute_scores(base: Path, world: World, method: str = "Full", **training: Any) -> torch.Tensor:
    """The rewards of a recipe's network before its first step."""
    recipe = networks.recipe(base, objective=REWARDS, method={"type": method}, **training)
    return score(networks.build(recipe, base, world))


def score(network: Any) -> torch.Tensor:
    split = networks.random_split(documents=2, examples=3)
    return reward.score(network, pack.collate(split, [[0, 1, 2]], pad_id=PAD))


def score_alone(model: Any) -> torch.Tensor:
    """The rewards of the same documents by the model's own forward pass."""
    split = networks.random_split(documents=2, examples=3)
    documents = [
        torch.from_numpy(split.tokens[begin:end].copy()).long()[None]
        for begin, end in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    with torch.no_grad():
        return torch.cat([model.eval()(input_ids=document).logits[:, 0] for document in documents])


def test_a_new_score_head_depends_on_the_seed_alone(base_model: Path, world: World) -> None:
    full, lora = (compute_scores(base_model, world, method) for method in ("Full", "LoRA"))
    torch.testing.assert_close(lora, full)
    assert not torch.allclose(compute_scores(base_model, world, seed=1), full, rtol=1e-2)
    # In four bits, the decoder is rounded, and the score head is the same.
    recipe = networks.recipe(base_model, objective=REWARDS, method={"type": "QLoRA"})
    heads: list[Any] = [
        networks.build(networks.recipe(base_model, objective=REWARDS), base_model, world).head,
        networks.build(recipe, base_model, world).head,
    ]
    weights = [[*head.parameters()][-1] for head in heads]
    full_weights = [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in weights]
    torch.testing.assert_close(full_weights[0], full_weights[1], check_dtype=False)


@pytest.mark.parametrize("method", ["Full", "LoRA"])
@pytest.mark.parametrize("stored", ["safetensors", "pickle"])
def test_a_reward_model_keeps_its_score_head(
    method: str, stored: str, base_model: Path, tmp_path: Path, world: World
) -> None:
    from transformers import AutoModelForSequenceClassification

    base = save_reward_model(base_model, tmp_path / "rewards")
    model = AutoModelForSequenceClassification.from_pretrained(base)
    if stored == "pickle":
        torch.save(model.state_dict(), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    torch.testing.assert_close(compute_scores(base, world, method), score_alone(model), rtol=1e-4, atol=1e-5)


def test_a_language_model_in_a_pickle_gets_a_score_head(
    base_model: Path, tmp_path: Path, world: World
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "pickled"
    model = AutoModelForCausalLM.from_pretrained(base_model)
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    AutoTokenizer.from_pretrained(base_model).save_pretrained(folder)
    torch.testing.assert_close(compute_scores(folder, world), compute_scores(base_model, world))


@pytest.mark.parametrize("of_reward_model", [False, True], ids=["of a language model", "of a reward model"])
def test_an_adapter_of_a_reward_model_is_continued_or_merged(
    *, of_reward_model: bool, base_model: Path, tmp_path: Path, world: World
) -> None:
    base = save_reward_model(base_model, tmp_path / "base") if of_reward_model else base_model
    adapter = save_reward_adapter(base, tmp_path / "adapter")
    expected = score_alone(load_reward_adapter(adapter))

    recipe = networks.recipe(adapter, objective=REWARDS, method={"type": "LoRA"})
    going_on = recipe.model_copy(update={"model": recipe.model.model_copy(update={"adapter": "Continue"})})
    going_on = continued.apply_adapter_config(going_on, adapter)
    source = download.fetch(str(adapter), tmp_path / "fetched")
    network = build.build_network(
        going_on,
        source.base,
        load_tokenizer(going_on.model, adapter),
        world,
        tmp_path / "teacher",
        adapter_source=source,
    )
    torch.testing.assert_close(score(network), expected, rtol=1e-4, atol=1e-5)

    merged = merge.fetch(recipe.model, tmp_path / "merging", world).base
    load_tokenizer(recipe.model, adapter).save_pretrained(merged)
    torch.testing.assert_close(compute_scores(merged, world), expected, rtol=1e-4, atol=1e-5)

    # For a command of the user's, in one folder, with the token by which padded rows are scored.
    standalone.write(recipe, str(adapter), tmp_path / "standalone")
    config = json.loads((tmp_path / "standalone" / "config.json").read_text())
    assert (config["architectures"], config["pad_token_id"]) == (["LlamaForSequenceClassification"], PAD)


def test_an_adapter_of_another_task_is_not_continued(base_model: Path, tmp_path: Path) -> None:
    adapters = {
        "SFT": save_reward_adapter(base_model, tmp_path / "rewards"),
        "RewardModel": save_adapter(base_model, tmp_path / "language"),
    }
    sentences = {}
    for objective, adapter in adapters.items():
        recipe = networks.recipe(adapter, objective={"type": objective}, method={"type": "LoRA"})
        with pytest.raises(PodFailure) as refused:
            continued.apply_adapter_config(recipe, adapter)
        sentences[objective] = refused.value.message.replace(str(adapter), "A")
    assert sentences == {
        "SFT": "model.base A is the adapter of a reward model: set objective.type RewardModel",
        "RewardModel": "model.base A is the adapter of a language model, without a score head to continue: set model.adapter "
        "Merge",
    }


def test_the_padding_token_of_a_multimodal_model_is_that_of_its_text(tmp_path: Path) -> None:
    for config in ({"a": 1}, {"text_config": {"a": 1}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        score_head.write_padding(tmp_path, 7)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written.get("text_config", written)["pad_token_id"] == 7
