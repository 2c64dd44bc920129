"""Weights come from files as they are in them, each rank its part, and what is wrong with them is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError
from support import networks
from support.model_files import (
    KINDS,
    READ_BY_RANK_0,
    apart,
    as_pickle,
    corrected,
    saved,
    twice,
    whole_weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


def of_transformers(network: Network, folder: Path) -> PreTrainedModel:
    """What transformers reads, once the network is checked to have its weights to the bit."""
    from transformers import AutoModelForCausalLM

    expected: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(
        whole_weights(network),
        {name: weight.detach() for name, weight in expected.named_parameters()},
        rtol=0,
        atol=0,
    )
    return expected


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_from_pretrained(
    kind: str, base_model: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save, options = KINDS[kind]
    folder = save(base_model, tmp_path / "base", **options)
    assert ("several" in kind) == (folder / "model.safetensors.index.json").exists()
    network = networks.build(networks.recipe(folder), folder, world)
    expected = of_transformers(network, folder)
    tied = network.base.get_input_embeddings().weight is network.base.get_output_embeddings().weight
    assert tied == ("untied" not in kind)
    assert ("rank 0 loads all of them" in capsys.readouterr().out) == (kind in READ_BY_RANK_0)
    # What no file holds: the frequencies of the rotary embedding.
    buffers = dict(network.base.named_buffers())
    torch.testing.assert_close(buffers, dict(expected.named_buffers()), rtol=0, atol=0)
    assert any("inv_freq" in name for name in buffers)


def test_a_buffer_that_the_files_lack_has_the_value_of_the_models_code(
    base_model: Path, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    base = corrected(base_model, tmp_path / "base", None)
    network = networks.build(networks.recipe(base), base, world)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(network.base.get_buffer(name), torch.zeros(4))
    assert (
        f"model.base: its files do not contain the weight {name}, which stays as the code of the model initializes it\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "method", [{"type": "Full"}, {"type": "LoRA", "lora": {"targetModules": ["o_proj"]}}]
)
def test_what_transformers_keeps_in_fp32_is_not_rounded(
    base_model: Path, tmp_path: Path, world: World, method: dict[str, Any]
) -> None:
    """Also not when it is exported."""
    from finetune_trainer.train.delivery import export

    correction = 1 + 2.0**-20
    base = corrected(base_model, tmp_path / "base", correction)
    recipe = networks.recipe(base, method=method, precision="BF16")
    network = networks.build(recipe, base, world)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(network.base.get_buffer(name), torch.full((4,), correction))
    if method["type"] == "Full":
        state = export.gather_weights(network.model, base, recipe, world)
        assert torch.equal(state[name], torch.full((4,), correction))
        assert {value.dtype for of, value in state.items() if of != name} == {torch.bfloat16}


# What the files of a base hold that its config ties, and whether it stays tied.
ENDS: dict[str, tuple[Callable[..., Path], dict[str, str], bool]] = {
    "one weight twice": (twice, {}, True),
    "two weights": (apart, {}, False),
    "two weights by other names": (apart, {"embedding": "embed_tokens.weight"}, False),
}


@pytest.mark.parametrize("method", ["Full", "QLoRA"])
@pytest.mark.parametrize(("save", "options", "tied"), ENDS.values(), ids=ENDS)
def test_ends_are_tied_if_the_files_have_the_same(
    *,
    save: Callable[..., Path],
    options: dict[str, str],
    tied: bool,
    method: str,
    base_model: Path,
    tmp_path: Path,
    world: World,
) -> None:
    folder = save(base_model, tmp_path / "base", **options)
    network = networks.build(networks.recipe(folder, method={"type": method}), folder, world)
    if method == "Full":
        of_transformers(network, folder)
    # What is exported says so too.
    assert (network.tied, network.base.config.tie_word_embeddings) == (tied, tied)


@pytest.mark.parametrize(
    ("method", "precision", "dtype_name", "frozen", "trained"),
    [
        ("Full", "BF16", "FP32", set(), {torch.float32}),
        ("Full", "BF16", "BF16", set(), {torch.bfloat16}),
        ("LoRA", "BF16", "FP32", {torch.bfloat16}, {torch.float32}),
        ("LoRA", "FP16", "FP32", {torch.float16}, {torch.float32}),
        ("LoRA", "FP32", "FP32", {torch.float32}, {torch.float32}),
        ("DoRA", "BF16", "FP32", {torch.bfloat16}, {torch.float32}),
    ],
)
def test_what_is_trained_is_kept_in_fp32_unless_the_optimizer_rounds(
    *,
    base_model: Path,
    world: World,
    method: str,
    precision: str,
    dtype_name: str,
    frozen: set[torch.dtype],
    trained: set[torch.dtype],
) -> None:
    recipe = networks.recipe(
        base_model, method={"type": method}, precision=precision, optimizer={"weights": dtype_name}
    )
    weights = list(networks.build(recipe, base_model, world).parameters())
    assert {weight.dtype for weight in weights if not weight.requires_grad} == frozen
    assert {weight.dtype for weight in weights if weight.requires_grad} == trained


@pytest.mark.parametrize("precision", ["BF16", "FP32"])
def test_a_four_bit_base_is_as_bitsandbytes_packs_it(base_model: Path, world: World, precision: str) -> None:
    """Trap 3: it is whole on each rank, and nothing casts the packed bytes."""
    from torch.distributed.tensor import DTensor

    recipe = networks.recipe(base_model, method={"type": "QLoRA"}, precision=precision)
    network = networks.build(recipe, base_model, world)
    packed = {
        name: weight
        for name, weight in network.named_parameters()
        if ".base_layer." in name and weight.ndim == 2
    }
    assert len(packed) == 2 * 7
    assert {weight.dtype for weight in packed.values()} == {torch.uint8}
    assert not any(isinstance(weight, DTensor) for weight in packed.values())
    assert all(isinstance(weight, DTensor) for weight in network.parameters() if weight.requires_grad)


def damaged(base: Path, folder: Path) -> None:
    saved(base, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


def no_safetensors_at_all(base: Path, folder: Path) -> None:
    saved(base, folder)
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 20)


def a_piece_is_missing(base: Path, folder: Path) -> None:
    saved(base, folder, pieces="20KB")
    max(folder.glob("model-*.safetensors")).unlink()


def a_pickle_that_is_not_tied(base: Path, folder: Path) -> None:
    as_pickle(base, folder)
    weights = torch.load(folder / "pytorch_model.bin")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    torch.save(weights, folder / "pytorch_model.bin")


def no_weights(base: Path, folder: Path) -> None:
    saved(base, folder)
    (folder / "model.safetensors").unlink()


def config_of_another(base: Path, folder: Path) -> None:
    saved(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


def vocabulary_of_another(base: Path, folder: Path) -> None:
    saved(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


def stored_by(quantization: dict[str, object]) -> Callable[[Path, Path], None]:
    def store(base: Path, folder: Path) -> None:
        saved(base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))

    return store


@pytest.mark.parametrize(
    ("break_it", "reason", "sentence"),
    [
        (damaged, "ModelNotLoadable", "model.base BASE cannot be loaded: Error while deserializing header: "),
        (
            no_safetensors_at_all,
            "ModelNotLoadable",
            "model.base BASE cannot be loaded: Error while deserializing header: ",
        ),
        (
            a_piece_is_missing,
            "ModelNotLoadable",
            "model.base BASE cannot be loaded: No such file or directory: ",
        ),
        (
            no_weights,
            "ModelNotLoadable",
            "model.base BASE cannot be loaded: Error no file named model.safetensors, or pytorch_model.bin, found in",
        ),
        (
            a_pickle_that_is_not_tied,
            "ModelNotLoadable",
            "model.base BASE cannot be loaded: its files have a separate lm_head.weight, which config.json ties to another "
            "weight: set tie_word_embeddings to false in config.json",
        ),
        (
            config_of_another,
            "ModelNotLoadable",
            "model.base BASE cannot be loaded: model.layers.0.mlp.down_proj.weight has the shape [32, 64] in "
            "model.safetensors, but [32, 96] according to config.json",
        ),
        (
            stored_by({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "ModelNotLoadable",
            "model.base BASE is stored quantized (fp8), and quantized weights cannot be trained: use",
        ),
        (
            stored_by({"quant_method": "gptq", "bits": 4, "group_size": 128}),
            "ModelNotLoadable",
            "model.base BASE is stored quantized (gptq), and quantized weights cannot be trained: use",
        ),
        (
            stored_by({"quant_method": "mxfp4"}),
            "ModelNotLoadable",
            "model.base BASE is stored quantized (mxfp4), and quantized weights cannot be trained: use",
        ),
        (
            stored_by({"quant_method": "bitsandbytes", "load_in_4bit": True}),
            "ModelNotLoadable",
            "model.base BASE is stored quantized (bitsandbytes), and quantized weights cannot be trained: use",
        ),
        (
            vocabulary_of_another,
            "VocabularyMismatch",
            "the tokenizer of model.base BASE has token ids up to ",
        ),
    ],
)
def test_what_is_wrong_with_a_base_is_told(
    *,
    break_it: Callable[[Path, Path], None],
    reason: str,
    sentence: str,
    base_model: Path,
    tmp_path: Path,
    world: World,
) -> None:
    break_it(base_model, tmp_path)
    with pytest.raises(PodFailure) as refused:
        networks.build(networks.recipe(tmp_path), tmp_path, world)
    assert (refused.value.exit_code, refused.value.reason) == (RecipeRefusedError.exit_code, reason)
    assert refused.value.message.replace(str(tmp_path), "BASE").startswith(sentence)
