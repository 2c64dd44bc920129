"""An adapter that was merged is its base with the adapter on it, in the type that the base is stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_trainer import origin
from finetune_trainer.origin import Origin
from finetune_trainer.outcome import PodFailure
from finetune_trainer.train.model import merge
from support import networks
from support.model_files import with_biases

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "LoRA": (torch.bfloat16, {}),
    "LoRA in fp32": (torch.float32, {}),
    "rsLoRA": (torch.bfloat16, {"use_rslora": True}),
    "DoRA": (torch.bfloat16, {"use_dora": True}),
    "biases": (torch.bfloat16, {"bias": "lora_only"}),
    "whole modules": (torch.bfloat16, {"modules_to_save": ["lm_head"]}),
}


def adapted(base: Path, folder: Path, dtype: torch.dtype, changes: dict[str, Any]) -> Path:
    """A copy of the base in `folder/base`, stored in a type, and an adapter of it, which says something, in `folder`."""
    if "bias" in changes:
        base = with_biases(base, folder.with_name("biased"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if "modules_to_save" in changes:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **changes)
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_weights_are_summed_in_fp32_and_rounded_once(case: str, base_model: Path, tmp_path: Path) -> None:
    dtype, changes = CASES[case]
    adapter = adapted(base_model, tmp_path / "adapter", dtype, changes)
    spec = networks.recipe(adapter).model
    merge.into(adapter / "base", adapter, spec, tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(adapter / "base", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().to(dtype)
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(adapter / "base", dtype="auto").state_dict()
    changed = {
        name.split(".")[-2] for name, weight in found.state_dict().items() if weight.ne(before[name]).any()
    }
    assert changed == {"q_proj", "down_proj", *changes.get("modules_to_save", [])}


# Adapters that tell an output layer from the embedding that it shares its weight with.
APART: dict[str, dict[str, Any]] = {
    "of the output layer": {"target_modules": ["q_proj", "lm_head"]},
    "of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("changes", APART.values(), ids=APART)
def test_what_a_tied_base_says_with_an_adapter_it_says_merged(
    changes: dict[str, Any], base_model: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_model),
        peft.LoraConfig(task_type="CAUSAL_LM", r=4, **changes),
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    wrapped.save_pretrained(adapter, save_embedding_layers=False)
    merge.into(base_model, adapter, networks.recipe(adapter).model, tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not found.config.tie_word_embeddings
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, wrapped.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_base_that_an_adapter_is_to_name_has_a_digest(base_model: Path, tmp_path: Path) -> None:
    spec, merged = (
        networks.recipe(base).model
        for base in (base_model, adapted(base_model, tmp_path / "a", torch.float32, {}))
    )
    with networks.alone() as world:
        found = [merge.fetch(spec, tmp_path / "to", world, named=named).origin for named in (False, True)]
        # What is merged here lies nowhere else.
        nowhere = merge.fetch(merged, tmp_path / "to", world, named=True).origin
    at = str(base_model)
    assert (found, nowhere) == ([Origin(at), Origin(at, digest=origin.digest(base_model))], None)


def refused(adapter: Path, folder: Path, world: World) -> str:
    with pytest.raises(PodFailure) as failure:
        merge.fetch(networks.recipe(adapter).model, folder, world, "objective.distillation.teacher")
    assert failure.value.reason == "ModelNotLoadable"
    return failure.value.message.replace(str(adapter.parent), "")


def test_an_adapter_that_cannot_be_merged_is_refused(base_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_model)
    prompt = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompt.peft_config["default"].base_model_name_or_path = str(base_model)
    prompt.save_pretrained(tmp_path / "prompt")
    damaged = adapted(base_model, tmp_path / "damaged", torch.float32, {})
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    other = adapted(base_model, tmp_path / "other", torch.float32, {})
    config = other / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    absent = adapted(base_model, tmp_path / "absent", torch.float32, {})
    config = absent / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"k_proj"'))
    with networks.alone() as world:
        assert refused(tmp_path / "prompt", tmp_path / "1", world) == (
            "objective.distillation.teacher /prompt is a PROMPT_TUNING adapter, which cannot be merged into its base: "
            f"name the base, {base_model}"
        )
        assert refused(damaged, tmp_path / "2", world).startswith(
            "objective.distillation.teacher /damaged cannot be loaded: "
        )
        assert refused(other, tmp_path / "3", world).startswith(
            "objective.distillation.teacher /other cannot be loaded: the adapter does not fit its base: size mismatch "
            "for base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight: "
        )
        assert refused(absent, tmp_path / "4", world).startswith(
            "objective.distillation.teacher /absent cannot be loaded: the adapter does not fit its base: Found missing "
            "adapter keys while loading the checkpoint: "
        )
