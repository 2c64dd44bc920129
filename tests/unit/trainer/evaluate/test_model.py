"""The two models of an evaluation, and their losses beside those of transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from finetune_crds.recipe import Recipe
from finetune_trainer.evaluate import loss, model
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models import download
from finetune_trainer.models.download import Source
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from support import networks
from support.cells import WARNINGS
from support.evaluations import save_adapter
from support.model_files import saved, too_large_for_fp16

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
CPU = torch.device("cpu")
FP32 = torch.float32


def plain_loss(network: Any, split: Split) -> float:
    """The mean negative log-likelihood of the targets, one document at a time, of a model's own logits."""
    total, targets = 0.0, 0
    for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        tokens, mask = torch.tensor(split.tokens[begin:end]).long(), split.loss_mask[begin:end]
        with torch.no_grad():
            logits = network(input_ids=tokens[None]).logits[0, -len(tokens) :]
        labels = tokens[1:].masked_fill(~torch.tensor(mask[1:]), -100)
        total += functional.cross_entropy(logits[:-1].float(), labels, reduction="sum").item()
        targets += int(mask[1:].sum())
    return total / targets


@pytest.mark.parametrize("kind", ["LoRA", "PromptTuning", "PrefixTuning", None])
def test_the_loss_is_that_of_transformers(base_model: Path, tmp_path: Path, kind: str | None) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    folder = save_adapter(base_model, tmp_path / "adapter", kind) if kind else base_model
    auto = AutoPeftModelForCausalLM if kind else AutoModelForCausalLM
    split = networks.random_split(examples=7)
    source = download.fetch(str(folder), tmp_path / "unused")
    with model.load_model(
        source, networks.recipe(base_model).model, "the version", CPU, dtype=FP32
    ) as network:
        losses = [
            loss.compute_mean_loss(network, split, batch_size=size, pad_id=0, device=CPU) for size in (1, 3)
        ]
    expected = plain_loss(auto.from_pretrained(folder).eval(), split)
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["", "LoRA"])
def test_the_base_has_rows_for_new_tokens(base_model: Path, tmp_path: Path, kind: str) -> None:
    folder = save_adapter(base_model, tmp_path / "adapter", kind) if kind else base_model
    source, spec = download.fetch(str(folder), tmp_path / "unused"), networks.recipe(base_model).model
    with model.load_model(source, spec, model.BASE, CPU, dtype=FP32) as network:
        vocabulary = network.head.vocabulary
        expected = network.base(torch.tensor([[5, 7]])).logits
    new = NewTokens((vocabulary, vocabulary + 1))
    with model.load_model(source, spec, model.BASE, CPU, new, dtype=FP32) as network:
        logits = network.base(torch.tensor([[5, 7, vocabulary + 1]])).logits
    assert logits.shape[-1] == vocabulary + 2
    torch.testing.assert_close(logits[:, :2, :vocabulary], expected, rtol=1e-5, atol=1e-5)


def test_a_model_leaves_the_memory(base_model: Path, tmp_path: Path) -> None:
    import weakref

    with model.load_model(
        download.fetch(str(base_model), tmp_path), networks.recipe(base_model).model, "it", CPU, dtype=FP32
    ) as network:
        weights = weakref.ref(next(network.model.parameters()))
        assert weights() is not None
    assert weights() is None


def recipe(base: Path, adapter: str = "Merge") -> Recipe:
    tiny_recipe = networks.recipe(base, method={"type": "LoRA"})
    return tiny_recipe.model_copy(update={"model": tiny_recipe.model.model_copy(update={"adapter": adapter})})


def test_the_base_of_an_adapter_is_what_lies_under_it(base_model: Path, tmp_path: Path) -> None:
    """It is not fetched again, and its files are those that the adapter was trained on."""
    version = download.fetch(str(save_adapter(base_model, tmp_path / "adapter")), tmp_path / "unused")
    missing_base = recipe(tmp_path / "gone")
    assert model.fetch_base(missing_base, version, tmp_path) == Source(
        base_model, version.tokenizer, None, str(base_model), version.origin
    )


def test_the_base_of_a_whole_model_is_that_of_the_recipe(base_model: Path, tmp_path: Path) -> None:
    version = download.fetch(str(saved(base_model, tmp_path / "version")), tmp_path / "unused")
    assert model.fetch_base(recipe(base_model), version, tmp_path).base == base_model


def test_the_base_of_an_adapter_that_is_trained_further_has_the_first_one(
    base_model: Path, tmp_path: Path
) -> None:
    first, second = (save_adapter(base_model, tmp_path / name) for name in ("first", "second"))
    version = download.fetch(str(second), tmp_path / "unused")
    source = model.fetch_base(recipe(first, "Continue"), version, tmp_path)
    assert (source.base, source.adapter) == (base_model, first)


def test_a_version_that_is_gone_is_named(base_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        model.fetch_version(recipe(base_model), "/gone", tmp_path)
    assert refused.value.message.startswith("the version /gone does not exist in the pod: ")


def test_a_version_without_weights_is_named(base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((base_model / "config.json").read_bytes())
    source = Source(tmp_path, base_model)
    refusal = pytest.raises(RecipeRefusedError, match=r"^the version models:/a/1 cannot be loaded: ")
    spec = model.build_version_spec(recipe(base_model), "models:/a/1")
    with refusal as refused, model.load_model(source, spec, model.VERSION, CPU, dtype=FP32):
        pass
    assert refused.value.exit_code == 64


def test_the_device_is_that_of_the_pod_unless_the_training_is_on_cpus(base_model: Path) -> None:
    gpu_recipe = recipe(base_model)
    on_cpus = gpu_recipe.model_copy(
        update={"distributed": gpu_recipe.distributed.model_copy(update={"device": "CPU"})}
    )
    assert model.choose_device(on_cpus) == CPU
    assert model.choose_device(gpu_recipe).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_model_that_overflows_in_fp16_is_told_from_a_broken_one(base_model: Path, tmp_path: Path) -> None:
    """A GPU without BF16 evaluates in FP16 what was trained in BF16."""
    base = too_large_for_fp16(base_model, tmp_path / "base", 1e5)
    spec, source = networks.recipe(base).model, download.fetch(str(base), tmp_path)
    refusal = pytest.raises(RecipeRefusedError)
    with refusal as refused, model.load_model(source, spec, model.VERSION, CPU, dtype=torch.float16):
        pass
    assert (refused.value.reason, refused.value.message) == (
        "ModelOverflows",
        f"the version {base} computes NaN logits because it overflows in FP16 or its weights are broken: request in "
        "spec.pods.evaluate.template a GPU of compute capability 8.0 or higher, which computes in BF16, or train with "
        "training.precision FP32",
    )
    with model.load_model(source, spec, model.VERSION, CPU, dtype=FP32):
        pass


def test_texts_end_at_the_stops_of_the_files_and_of_the_tokenizer(base_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base_model, tmp_path / "adapter")
    (adapter / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    spec = recipe(base_model).model
    tokenizer = load_tokenizer(spec, base_model)
    stops = {
        name: model.read_stops(download.fetch(str(folder), tmp_path), spec, tokenizer)
        for name, folder in (("adapter", adapter), ("base", base_model))
    }
    assert stops == {"adapter": {7, 9, tokenizer.eos_token_id}, "base": {tokenizer.eos_token_id}}
