"""Low-rank layers that begin with PiSSA: as peft begins them, and exported as an adapter of the base as it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from finetune_crds.training import Method
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models import download
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.delivery import export
from finetune_trainer.train.model.adapters import adapt, continued, pissa
from finetune_trainer.train.model.network.trained_network import trained_parameters
from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
from finetune_trainer.train.model.weights import merge
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

# With rank 16, all singular values of these layers are found: the decomposition is exact.
RANK, ALPHA = 16, 24
STEPS, RATE = 6, 1e-3


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


def recipe(base: Path, lora: dict[str, Any] | None = None, **more: Any) -> Recipe:
    spec = {"rank": RANK, "alpha": ALPHA, "init": "PiSSA", **(lora or {})}
    return networks.recipe(base, method={"type": "LoRA", "lora": spec}, learningRate=RATE, **more)


def of_peft(base: Path, **changes: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        init_lora_weights="pissa",
        **changes,
    )
    return peft.get_peft_model(model, config)


def batch() -> pack.Batch:
    return pack.collate(networks.of_documents(list(range(5, 45))), [[0]], pad_id=0)


def own_logits(network: Network) -> torch.Tensor:
    captured: list[torch.Tensor] = []

    def computed(
        network: Network, batch: pack.Batch, _hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        captured.append(network.compute_model_outputs(batch))
        return torch.zeros(()), torch.zeros(0)

    with network.no_grad_forward(computed):
        network(batch())
    return captured[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        base_logits: torch.Tensor = model.eval()(input_ids=batch().input_ids).logits
    return base_logits


def splits(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The frozen weight of each layer and the product of its low-rank weights, whole, by its name."""
    singular = {}
    for name, layer in model.named_modules():
        if "default" in getattr(layer, "lora_A", ()):
            parts = (layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"])
            frozen, first, second = (
                getattr(part.weight, "full_tensor", lambda weight=part.weight: weight)().detach()
                for part in parts
            )
            singular[name] = (frozen.float(), layer.scaling["default"] * (second @ first))
    return singular


def losses(network: Network, made_of: Recipe) -> list[float]:
    """Of some steps on one document."""
    (optimizer,) = build_optimizers(network, made_of.training)
    values = []
    for _ in range(STEPS):
        loss, _ = network.train()(batch())
        (loss / batch().targets_count).backward()
        values.append(loss.item() / batch().targets_count)
        optimizer.step()
        optimizer.zero_grad()
    return values


def losses_of_peft(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=RATE, weight_decay=0.0)
    ids, values = batch().input_ids, []
    for _ in range(STEPS):
        logits = model(input_ids=ids).logits[0, :-1]
        loss = functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        values.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("scaling", ["Standard", "RankStabilized"])
def test_it_begins_and_learns_as_that_of_peft(base_model: Path, world: World, scaling: str) -> None:
    """The products are compared: the signs of singular vectors are free, and AdamW treats both alike.

    fp32 rounds singular vectors to 2^-24 divided by the distance of their values, which is above 1e-3 of the greatest here: 1e-4.
    """
    made_of = recipe(base_model, {"scaling": scaling})
    network = networks.build(made_of, base_model, world)
    theirs = of_peft(base_model, use_rslora=scaling == "RankStabilized")
    base = dict(AutoModelForCausalLM.from_pretrained(base_model).named_parameters())
    ours = splits(network.model)
    assert len(ours) == 14
    torch.testing.assert_close(ours, splits(theirs), rtol=1e-4, atol=1e-6)
    for name, (frozen, product) in ours.items():
        weight = base[f"{name.removeprefix('base_model.model.')}.weight"]
        torch.testing.assert_close(frozen + product, weight.detach(), rtol=0, atol=1e-7)
        assert frozen.norm() < 0.8 * weight.norm()
    assert losses(network, made_of) == pytest.approx(losses_of_peft(theirs), rel=1e-4)


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_the_model_begins_as_its_base(base_model: Path, world: World, precision: str) -> None:
    """Where the base has a rounding of a weight, there are three here, of the rest, A0 and B0, and of what A0 gives: four in all.

    The error of the logits, against those in fp32, is no more than four times that of the base.
    """
    exact = logits(AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32))
    plain = networks.build(recipe(base_model, {"init": "Default"}, precision=precision), base_model, world)
    network = networks.build(recipe(base_model, precision=precision), base_model, world)
    base, pissa_error = (
        float((own_logits(built) - exact).norm() / exact.norm()) for built in (plain, network)
    )
    assert pissa_error < max(1e-6, 4 * base)
    before, begun = (built.eval()(batch())[0].item() for built in (plain, network))
    assert begun == pytest.approx(before, rel=max(1e-6, 4 * base))


def test_what_bf16_rounds_of_the_frozen_weights_is_all_that_an_exported_adapter_lacks(
    base_model: Path, world: World
) -> None:
    """The adapter gives W + s (B A - B0 A0) where the trained network has round(W - s B0 A0) + s B A, whatever A and B have learned.

    bf16 rounds to 8 bits: by 2^-8 of a number at most. The network computes with bf16 weights, of a base that is stored so.
    """
    weights = {
        name: weight.detach().bfloat16().float()
        for name, weight in AutoModelForCausalLM.from_pretrained(base_model).named_parameters()
    }
    network = networks.build(recipe(base_model, precision="BF16"), base_model, world)
    rounded = 0.0
    for name, (frozen, product) in splits(network.model).items():
        lacking = (frozen + product - weights[f"{name.removeprefix('base_model.model.')}.weight"]).abs()
        assert (lacking <= 2**-8 * frozen.abs() + 1e-7).all(), name
        rounded = max(rounded, lacking.max().item())
    assert rounded > 1e-5


def exported(network: Network, made_of: Recipe, base: Path, world: World, folder: Path) -> Path:
    """The adapter of a network after some steps, as it is written."""
    losses(network, made_of)
    state = export.gather_weights(network.model, base, made_of, world)
    network.model.save_pretrained(
        folder, state_dict=pissa.convert_to_lora(network.model, state), save_embedding_layers=False
    )
    return folder


@pytest.mark.parametrize("scaling", ["Standard", "RankStabilized"])
def test_what_is_exported_is_an_adapter_of_the_base_as_it_was(
    base_model: Path, world: World, tmp_path: Path, scaling: str
) -> None:
    """To peft, to a merge, and to a job that trains it further."""
    made_of = recipe(base_model, {"scaling": scaling, "rank": 4})
    network = networks.build(made_of, base_model, world)
    adapter = exported(network, made_of, base_model, world, tmp_path / "adapter")
    trained_logits = own_logits(network)
    plain = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    assert (trained_logits - logits(plain)).abs().max() > 0.01

    config = json.loads((adapter / "adapter_config.json").read_text())
    fields = ("r", "lora_alpha", "init_lora_weights", "use_rslora")
    assert [config[name] for name in fields] == [8, 2 * ALPHA, True, scaling == "RankStabilized"]
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(plain, adapter)), trained_logits, rtol=1e-4, atol=1e-5
    )
    merge.merge_into_base(base_model, adapter, made_of.model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), trained_logits, rtol=1e-4, atol=1e-5)

    further = networks.recipe(adapter, method={"type": "LoRA"})
    model = further.model.model_copy(update={"adapter": "Continue"})
    configured = continued.apply_adapter_config(further.model_copy(update={"model": model}), adapter)
    source = download.Source(base_model, base_model, adapter, str(base_model))
    tokenizer = load_tokenizer(configured.model, base_model)
    again = build.build_network(
        configured, base_model, tokenizer, world, tmp_path / "teacher", adapter_source=source
    )
    torch.testing.assert_close(own_logits(again), trained_logits, rtol=1e-4, atol=1e-5)


def test_biases_and_whole_layers_are_exported_beside_it(
    one_layer: Path, world: World, tmp_path: Path
) -> None:
    made_of = recipe(one_layer, {"rank": 4, "bias": "All", "modulesToSave": ["embed_tokens"]})
    network = networks.build(made_of, one_layer, world)
    adapter = exported(network, made_of, one_layer, world, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(one_layer, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, adapter)
    torch.testing.assert_close(logits(loaded), own_logits(network), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
def test_weights_that_are_stored_the_other_way_round(world: World) -> None:
    """Those of GPT-2 are inputs x outputs."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    base_logits, before = logits(model), model.transformer.h[0].attn.c_attn.weight.detach().clone()
    method = Method.model_validate({"type": "LoRA", "lora": {"rank": 2, "init": "PiSSA"}})
    adapted: Any = adapt.adapt(model, method, "org/base")
    pissa.check(adapted)
    pissa.allocate_initial(adapted)
    pissa.split_weights(adapted, world)
    torch.testing.assert_close(logits(adapted), base_logits, rtol=1e-4, atol=1e-5)
    layer = adapted.get_base_model().transformer.h[0].attn.c_attn
    values = torch.linalg.svdvals(before)
    residual = torch.linalg.svdvals(layer.get_base_layer().weight.detach())
    torch.testing.assert_close(residual[0], values[2], rtol=1e-2, atol=0)


def test_the_principal_part_is_found() -> None:
    """The sine of the angle between both subspaces falls with the ratio of singular values 17 and 8, to the power of 33."""
    torch.manual_seed(3)
    true_left, true_right = (torch.linalg.qr(torch.randn(size, 96)).Q for size in (160, 96))
    exact = torch.arange(1, 97) ** -0.25
    weight = true_left * exact @ true_right.t()
    state = torch.get_rng_state()
    left_vectors, values, right_vectors = pissa.compute_truncated_svd(weight, 8)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(values, exact[:8], rtol=1e-4, atol=0)
    for vectors, true in ((left_vectors, true_left[:, :8]), (right_vectors, true_right[:, :8])):
        outside = vectors - true @ (true.t() @ vectors)
        assert torch.linalg.matrix_norm(outside, 2) < 10 * (8 / 17) ** (0.25 * 33)
    torch.manual_seed(4)
    again = pissa.compute_truncated_svd(weight, 8)
    assert all(
        torch.equal(second_run, first_run)
        for second_run, first_run in zip(again, (left_vectors, values, right_vectors), strict=True)
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rank that is too high": (
        {"rank": 17, "targetModules": ["q_proj", "v_proj"]},
        "method.lora.init PiSSA needs 17 singular values (method.lora.rank), but model.layers.0.self_attn.v_proj has only 16: lower "
        "the rank, or remove the layer from method.lora.targetModules",
    ),
    "an output layer that is the embedding too": (
        {"targetModules": ["q_proj", "lm_head"]},
        "method.lora.init PiSSA changes the weight of lm_head, which model.embed_tokens shares: remove lm_head from "
        "method.lora.targetModules",
    ),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("lora", "message"), REFUSED.values(), ids=REFUSED)
def test_weights_that_cannot_be_split_are_refused(
    *, lora: dict[str, Any], message: str, base_model: Path, world: World
) -> None:
    with pytest.raises(PodFailure) as refused:
        networks.build(recipe(base_model, lora), base_model, world)
    assert refused.value.message == message


def test_other_adapters_are_left_alone(base_model: Path, world: World) -> None:
    network = networks.build(recipe(base_model, {"init": "Default"}), base_model, world)
    state = export.gather_weights(network.model, base_model, recipe(base_model), world)
    assert pissa.count_initial_numbers(network.model) == 0
    assert pissa.convert_to_lora(network.model, state) is state
    assert not [name for name in state if pissa.is_initial(name)]
