"""An adapter that was merged is its base with the adapter on it, in the type that the base is stored in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JetMoeConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from finetune_trainer.models import base_reference, download
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train import build
from finetune_trainer.train.model.weights import merge, standalone
from finetune_trainer.train.model.weights.standalone import Standalone
from support import networks
from support.model_files import corrected, with_biases

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
    merge.merge_into_base(adapter / "base", adapter, spec, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(adapter / "base", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().to(dtype)
    torch.testing.assert_close(dict(merged.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)
    before = AutoModelForCausalLM.from_pretrained(adapter / "base", dtype="auto").state_dict()
    changed = {
        name.split(".")[-2] for name, weight in merged.state_dict().items() if weight.ne(before[name]).any()
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
    merge.merge_into_base(base_model, adapter, networks.recipe(adapter).model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not merged.config.tie_word_embeddings
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, wrapped.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_base_that_an_adapter_is_to_name_has_a_digest(base_model: Path, tmp_path: Path) -> None:
    spec, merged = (
        networks.recipe(base).model
        for base in (base_model, adapted(base_model, tmp_path / "a", torch.float32, {}))
    )
    with networks.alone() as world:
        origins = [
            merge.fetch(spec, tmp_path / "to", world, with_digest=with_digest).origin
            for with_digest in (False, True)
        ]
        # What is merged here lies nowhere else.
        nowhere = merge.fetch(merged, tmp_path / "to", world, with_digest=True).origin
    at = str(base_model)
    assert (origins, nowhere) == (
        [Origin(at), Origin(at, digest=base_reference.compute_digest(base_model))],
        None,
    )


def refused(adapter: Path, folder: Path, world: World) -> str:
    with pytest.raises(PodFailure) as failure:
        merge.fetch(networks.recipe(adapter).model, folder, world, "objective.distillation.teacher")
    assert failure.value.reason == "ModelNotLoadable"
    return failure.value.message.replace(str(adapter.parent), "")


def test_a_base_that_is_stored_quantized_is_refused_before_its_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, base_model: Path, tmp_path: Path
) -> None:
    config = json.loads((base_model / "config.json").read_text("utf-8"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    fetch = download.fetch

    def small(*arguments: Any, without_weights: bool, **how: Any) -> download.Source:
        assert without_weights
        return fetch(*arguments, without_weights=without_weights, **how)

    monkeypatch.setattr(download, "fetch", small)
    with networks.alone() as world, pytest.raises(PodFailure) as refused:
        merge.fetch(networks.recipe(base).model, tmp_path, world, field="the teacher")
    assert (refused.value.exit_code, refused.value.reason) == (64, "ModelNotLoadable")
    assert refused.value.message.startswith(f"the teacher {base} is stored quantized (fp8), ")


def test_what_a_config_rules_out_is_refused_before_weights_are_fetched(tmp_path: Path) -> None:
    base = tmp_path / "base"
    JetMoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=8,
    ).save_pretrained(base)
    recipe = networks.recipe(base, activationCheckpointing="Full", packing=False)
    with networks.alone() as world, pytest.raises(PodFailure) as refused:
        merge.fetch(
            recipe.model, tmp_path, world, check=lambda config: build.check_base(recipe, config, world)
        )
    assert (refused.value.exit_code, refused.value.reason) == (64, "RecomputationUnsupported")


def test_an_adapter_that_cannot_be_merged_is_refused(base_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_model)
    prompt = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompt.peft_config["default"].base_model_name_or_path = str(base_model)
    prompt.save_pretrained(tmp_path / "prompt")
    damaged = adapted(base_model, tmp_path / "damaged", torch.float32, {})
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    wrong_rank = adapted(base_model, tmp_path / "other", torch.float32, {})
    config = wrong_rank / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    absent = adapted(base_model, tmp_path / "absent", torch.float32, {})
    config = absent / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"k_proj"'))
    packed = adapted(base_model, tmp_path / "packed", torch.float32, {})
    config = packed / "base" / "config.json"
    quantized = {**json.loads(config.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(quantized))
    with networks.alone() as world:
        assert refused(tmp_path / "prompt", tmp_path / "1", world) == (
            "objective.distillation.teacher /prompt is a PROMPT_TUNING adapter, which cannot be merged into its base: "
            f"name the base, {base_model}"
        )
        assert refused(damaged, tmp_path / "2", world).startswith(
            "objective.distillation.teacher /damaged cannot be loaded: "
        )
        assert refused(wrong_rank, tmp_path / "3", world).startswith(
            "objective.distillation.teacher /other cannot be loaded: the adapter does not fit its base: size mismatch "
            "for base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight: "
        )
        assert refused(absent, tmp_path / "4", world).startswith(
            "objective.distillation.teacher /absent cannot be loaded: the adapter does not fit its base: Found missing "
            "adapter keys while loading the checkpoint: "
        )
        assert refused(packed, tmp_path / "5", world).startswith(
            "/packed/base, the base of objective.distillation.teacher /packed, is stored quantized (mxfp4), and "
        )


TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# What is merged: the base, whether its ends are tied, and the adapter.
STREAMED: dict[str, tuple[type, dict[str, Any], bool, dict[str, Any]]] = {
    "all linear layers, tied": (LlamaConfig, {}, True, {"target_modules": "all-linear"}),
    "rsLoRA, untied": (LlamaConfig, {}, False, {**TARGETS, "use_rslora": True}),
    "DoRA": (LlamaConfig, {}, True, {**TARGETS, "use_dora": True}),
    "all biases": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        False,
        {**TARGETS, "bias": "all"},
    ),
    "both ends whole": (LlamaConfig, {}, False, {**TARGETS, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "a whole embedding, tied": (LlamaConfig, {}, True, {**TARGETS, "modules_to_save": ["embed_tokens"]}),
    "an output layer, tied": (LlamaConfig, {}, True, {"target_modules": ["q_proj", "lm_head"]}),
    "an embedding, tied": (LlamaConfig, {}, True, {"target_modules": ["q_proj", "embed_tokens"]}),
    "rows of tokens, tied": (LlamaConfig, {}, True, {**TARGETS, "trainable_token_indices": [5, 7]}),
    "Mixtral": (MixtralConfig, {"num_local_experts": 4}, False, {"target_modules": ["q_proj", "o_proj"]}),
    "experts of Mixtral": (
        MixtralConfig,
        {"num_local_experts": 4},
        False,
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "some experts of Qwen3": (
        Qwen3MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
        True,
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]},
    ),
}


def other_base(folder: Path, kind: type, tied: bool, more: dict[str, Any]) -> Path:
    """A base in BF16, in several files."""
    torch.manual_seed(0)
    config = kind(**SIZES, **HEADS, tie_word_embeddings=tied, **more)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="100KB"
    )
    return folder


def random_adapter(base: Path, folder: Path, changes: dict[str, Any]) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **changes))
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


def stored_in(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a saved model, and its configuration."""
    weights = {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == weights.keys()
    return weights, json.loads((folder / "config.json").read_text())


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("case", STREAMED)
def test_what_is_merged_file_by_file_is_what_is_merged_in_memory(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, more, tied, changes = STREAMED[case]
    base = other_base(tmp_path / "base", kind, tied, more)
    adapter = random_adapter(base, tmp_path / "adapter", changes)
    monkeypatch.setattr(standalone, "_MAX_SHARD_SIZE", "100KB")
    spec = networks.recipe(base).model
    merge.merge_into_base(base, adapter, spec, tmp_path / "streamed")
    monkeypatch.setattr(merge, "_needs_whole_base", lambda *_: True)
    merge.merge_into_base(base, adapter, spec, tmp_path / "whole")
    streamed, expected = stored_in(tmp_path / "streamed"), stored_in(tmp_path / "whole")
    torch.testing.assert_close(streamed[0], expected[0], rtol=0, atol=0)
    assert streamed[1] == expected[1]


def test_an_adapter_made_of_the_values_of_its_base_is_merged_in_memory(tmp_path: Path) -> None:
    base = other_base(tmp_path / "base", LlamaConfig, False, {})
    adapter = random_adapter(base, tmp_path / "adapter", {**TARGETS, "init_lora_weights": "pissa"})
    merge.merge_into_base(base, adapter, networks.recipe(base).model, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()
    torch.testing.assert_close(stored_in(tmp_path / "merged")[0], dict(expected), rtol=0, atol=0)


def test_one_layer_and_one_file_are_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = other_base(tmp_path / "base", LlamaConfig, False, {})
    adapter = random_adapter(base, tmp_path / "adapter", {"target_modules": "all-linear"})
    models: list[Any] = []
    alive_counts: list[int] = []
    of_a_layer = Standalone._merge

    def in_memory(model: Any) -> int:
        """Bytes of the base's matrices that are in memory: those in files are one number each."""
        matrices = (weight for weight in model.parameters() if weight.ndim == 2)
        return sum(weight.untyped_storage().nbytes() for weight in matrices)

    def recorded(self: Standalone, name: str) -> dict[str, torch.Tensor]:
        models.append(self.model)
        alive_counts.append(in_memory(self.model))
        merged = of_a_layer(self, name)
        assert len(self._merged) == 0
        return merged

    monkeypatch.setattr(Standalone, "_merge", recorded)
    monkeypatch.setattr(standalone, "_MAX_SHARD_SIZE", "40KB")
    merge.merge_into_base(base, adapter, networks.recipe(base).model, tmp_path / "merged")
    matrices = sum(weight.ndim == 2 for weight in models[0].parameters())
    assert (len(alive_counts), set(alive_counts), in_memory(models[0])) == (
        2 * 7,
        {2 * matrices},
        2 * matrices,
    )
    # The embedding and the output layer are larger than a file may be.
    sizes = sorted(file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors"))
    assert max(sizes[:-2]) < 42_000


COPIES: dict[str, Callable[[Path], None]] = {}


def changed(name: str) -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], Any]:
    """A way to store the weights of a base differently."""

    def with_change(change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        def rewrite(folder: Path) -> None:
            path = folder / "model.safetensors"
            weights = load_file(path)
            change(weights)
            save_file(weights, path, {"format": "pt"})

        COPIES[name] = rewrite

    return with_change


@changed("as it was saved")
def _same(weights: dict[str, torch.Tensor]) -> None:
    pass


@changed("a weight that is tied, twice")
def _twice(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.rotary.inv_freq"] = torch.zeros(3)


@changed("an output layer that is not the embedding")
def _apart(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


@changed("only the output layer")
def _head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")


@changed("in fp32")
def _in_fp32(weights: dict[str, torch.Tensor]) -> None:
    weights.update({name: value.float() for name, value in weights.items()})


@changed("without prefix")
def _without_prefix(weights: dict[str, torch.Tensor]) -> None:
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


@pytest.mark.parametrize("correction", [None, 1 + 2.0**-20])
def test_corrections_of_routers_are_copied_as_transformers_saves_them(
    correction: float | None, base_model: Path, tmp_path: Path
) -> None:
    base = corrected(base_model, tmp_path / "base", correction)
    merge.copy_base(base, networks.recipe(base).model, tmp_path / "copied")
    AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(tmp_path / "saved")
    copied, expected = (stored_in(tmp_path / way) for way in ("copied", "saved"))
    torch.testing.assert_close(copied[0], expected[0], rtol=0, atol=0)
    assert copied[1] == expected[1]


@pytest.mark.parametrize("case", COPIES)
def test_a_base_that_is_copied_is_what_transformers_saves(case: str, tmp_path: Path) -> None:
    for kind, more in ((LlamaConfig, {}), (MixtralConfig, {"num_local_experts": 4})):
        base = tmp_path / kind.__name__
        config = kind(**SIZES, **HEADS, tie_word_embeddings=True, **more)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
        COPIES[case](base)
        merge.copy_base(base, networks.recipe(base).model, tmp_path / f"{kind.__name__}-copied")
        AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(
            tmp_path / f"{kind.__name__}-saved"
        )
        copied, expected = (stored_in(tmp_path / f"{kind.__name__}-{way}") for way in ("copied", "saved"))
        torch.testing.assert_close(copied[0], expected[0], rtol=0, atol=0)
        assert copied[1] == expected[1]
