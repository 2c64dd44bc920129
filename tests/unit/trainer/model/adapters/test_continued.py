"""An adapter that is trained further begins as it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models import download
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train import build
from finetune_trainer.train.delivery import export
from finetune_trainer.train.model.adapters import continued
from finetune_trainer.train.model.weights import merge
from support import networks
from support.model_files import with_biases

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]
Json = dict[str, Any]


def save_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """An adapter of the base that says something."""
    config = peft.LoraConfig(
        **{
            "task_type": "CAUSAL_LM",
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "down_proj"],
            **changes,
        }
    )
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(folder)
    return folder


def recipe(adapter: Path, method: str = "LoRA") -> Recipe:
    plain = networks.recipe(adapter, method={"type": method})
    return plain.model_copy(update={"model": plain.model.model_copy(update={"adapter": "Continue"})})


# What peft has, and the fields that say it.
CASES: dict[str, tuple[str, Json, Json]] = {
    "LoRA": ("LoRA", {}, {}),
    "rsLoRA": (
        "LoRA",
        {"use_rslora": True, "lora_dropout": 0.1},
        {"scaling": "RankStabilized", "dropout": 0.1},
    ),
    "DoRA": ("DoRA", {"use_dora": True}, {}),
    "QLoRA": ("QLoRA", {}, {}),
    "whole layers": (
        "LoRA",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modulesToSave": ["embed_tokens", "model.embed_tokens"]},
    ),
    "biases": (
        "LoRA",
        {"bias": "all", "modules_to_save": ["lm_head"]},
        {"bias": "All", "modulesToSave": ["lm_head"]},
    ),
    "biases of its layers": ("DoRA", {"use_dora": True, "bias": "lora_only"}, {"bias": "LoraOnly"}),
}


@pytest.mark.parametrize(("method", "changes", "fields"), CASES.values(), ids=CASES)
def test_it_begins_as_it_ended(
    method: str, changes: Json, fields: Json, base_model: Path, tmp_path: Path
) -> None:
    if "bias" in changes:
        base_model = with_biases(base_model, tmp_path / "base")
    adapter = save_adapter(base_model, tmp_path / "adapter", **changes)
    written = recipe(adapter, method)
    with networks.alone() as world:
        fetched = merge.fetch(written.model, tmp_path / "fetched", world)
        assert fetched == replace(fetched, base=base_model, adapter=adapter, adapter_of=str(base_model))
        configured = continued.apply_adapter_config(written, adapter)
        assert configured.method.lora is not None
        assert configured.method.lora.model_dump(exclude_defaults=True) == {
            "rank": 4,
            "alpha": 6,
            "targetModules": ["down_proj", "q_proj"],
            **fields,
        }
        tokenizer = load_tokenizer(configured.model, base_model)
        network = build.build_network(
            configured, base_model, tokenizer, world, tmp_path / "teacher", adapter_source=fetched
        )
        state = export.gather_weights(network.model, base_model, configured, world)
    network.model.save_pretrained(tmp_path / "again", state_dict=state, save_embedding_layers=False)
    before, after = (
        peft.utils.load_peft_weights(str(folder), device="cpu") for folder in (adapter, tmp_path / "again")
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_model)


REFUSED: dict[str, tuple[str, Json, str]] = {
    "another method": ("LoRA", {"use_dora": True}, "is not an adapter of method LoRA: set method.type DoRA"),
    "another method yet": ("DoRA", {}, "is not an adapter of method DoRA: set method.type LoRA or QLoRA"),
    "more than layers": (
        "LoRA", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}},
        "has settings that the trainer does not support (rank_pattern, alpha_pattern): set model.adapter Merge",
    ),
    "a base that it changed": (
        "LoRA", {"init_lora_weights": "pissa"}, "has settings that the trainer does not support (init_lora_weights): set model.adapter Merge",
    ),
    "a rank that is too high": (
        "LoRA", {"r": 2000, "lora_alpha": 16},
        "has a value that method.lora.rank does not accept (Input should be less than or equal to 1024): set model.adapter Merge",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "what"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_cannot_go_on_is_refused(
    method: str, changes: Json, what: str, base_model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base_model, tmp_path / "adapter", **changes)
    with pytest.raises(PodFailure) as refused:
        continued.apply_adapter_config(recipe(adapter, method), adapter)
    assert refused.value.message == f"model.base {adapter} {what}"


def test_an_adapter_may_name_more_layers_than_a_recipe(base_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base_model, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    targets, saved = (
        sorted(f"model.layers.{layer}.{name}" for layer in range(40)) for name in ("mlp.up", "mlp.gate")
    )
    config = json.loads(path.read_text()) | {"target_modules": targets, "modules_to_save": saved}
    path.write_text(json.dumps(config))
    lora = continued.apply_adapter_config(recipe(adapter), adapter).method.lora
    assert lora is not None
    assert (lora.target_modules, lora.modules_to_save) == (targets, saved)


def test_a_prompt_a_pattern_and_a_plain_model_are_refused(base_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_model)
    peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).save_pretrained(tmp_path / "prompt")
    with pytest.raises(PodFailure, match="is a PROMPT_TUNING adapter"):
        continued.apply_adapter_config(recipe(tmp_path / "prompt"), tmp_path / "prompt")
    with networks.alone() as world, pytest.raises(PodFailure) as refused:
        merge.fetch(recipe(base_model).model, tmp_path / "to", world)
    assert refused.value.message == (
        f"model.base {base_model} is not an adapter, which model.adapter Continue requires: remove model.adapter"
    )


def test_weights_that_do_not_fit_are_refused(base_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base_model, tmp_path / "adapter")
    configured = continued.apply_adapter_config(recipe(adapter), adapter)
    narrower = save_adapter(base_model, tmp_path / "other", target_modules=["q_proj"])
    wider = save_adapter(base_model, tmp_path / "wider", target_modules=["q_proj", "down_proj", "up_proj"])
    fetched = download.Source(base_model, base_model, adapter, str(base_model))
    with networks.alone() as world:
        tokenizer = load_tokenizer(configured.model, base_model)
        model = build.build_network(
            configured, base_model, tokenizer, world, tmp_path / "teacher", adapter_source=fetched
        ).model
        for folder, what in (
            (
                narrower,
                "does not fit its base: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight is missing",
            ),
            (
                wider,
                "does not fit its base, which has no base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            ),
            (tmp_path, "has no adapter_model.safetensors"),
        ):
            with pytest.raises(PodFailure) as refused:
                continued.match_weights(model, folder, configured)
            assert refused.value.message.startswith(f"model.base {adapter} {what}")
