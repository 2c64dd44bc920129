"""The network of a recipe, and the losses that it would get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from finetune_crds.training import Model
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network.trained_network import Network, trained_parameters
from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
from finetune_trainer.train.objectives.answers import compute_reference
from finetune_trainer.train.objectives.distillation import TeacherStates
from finetune_trainer.train.objectives.sft import Sft
from support import networks
from support.model_files import too_large_for_fp16

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


def test_a_model_with_an_unsupported_lm_head_is_refused(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_logits = Network.compute_model_outputs
    monkeypatch.setattr(
        Network, "compute_model_outputs", lambda self, batch: 2 * original_logits(self, batch)
    )
    with networks.alone() as world, pytest.raises(RecipeRefusedError) as refused:
        networks.build(networks.recipe(base_model), base_model, world)
    assert refused.value.message == (
        f"model.base {base_model} is a llama, which has an unsupported LM head (the logits differ by "
        "50%): choose another model, or train it with your own script"
    )


@pytest.mark.parametrize("broken", [False, True])
def test_a_model_that_overflows_in_fp16_is_told_to_use_another_precision(
    *, broken: bool, base_model: Path, tmp_path: Path
) -> None:
    base = too_large_for_fp16(base_model, tmp_path / "base", float("nan") if broken else 1e5)
    with networks.alone() as world, pytest.raises(RecipeRefusedError) as refused:
        networks.build(networks.recipe(base, precision="FP16"), base, world)
    assert (refused.value.reason, refused.value.message) == (
        "ModelOverflows",
        f"model.base {base} computes NaN logits because it overflows in FP16 or its weights are broken: set "
        "training.precision to BF16 or FP32",
    )
    with networks.alone() as world:
        if broken:
            with pytest.raises(RecipeRefusedError, match=r"its weights are broken$"):
                networks.build(networks.recipe(base, precision="BF16"), base, world)
        else:
            networks.build(networks.recipe(base, precision="BF16"), base, world)


def distilled(base: Path, teacher: Path, precision: str) -> Recipe:
    return networks.recipe(
        base,
        objective={"type": "Distillation", "distillation": {"teacher": str(teacher)}},
        precision=precision,
    )


def test_a_teacher_that_overflows_in_fp16_is_refused(base_model: Path, tmp_path: Path) -> None:
    teacher = too_large_for_fp16(base_model, tmp_path / "teacher", 1e5)
    with networks.alone() as world, pytest.raises(RecipeRefusedError) as refused:
        networks.build(distilled(base_model, teacher, "FP16"), base_model, world)
    assert (refused.value.reason, refused.value.message) == (
        "ModelOverflows",
        f"objective.distillation.teacher {teacher} computes NaN logits because it overflows in FP16 or its weights "
        "are broken: set training.precision to BF16 or FP32",
    )
    with networks.alone() as world:
        networks.build(distilled(base_model, teacher, "BF16"), base_model, world)


def test_a_teacher_with_an_unsupported_lm_head_is_refused(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_logits = Network.compute_model_outputs
    monkeypatch.setattr(
        Network,
        "compute_model_outputs",
        lambda self, batch: (
            original_logits(self, batch) * (2 if isinstance(self.objective, TeacherStates) else 1)
        ),
    )
    with networks.alone() as world, pytest.raises(RecipeRefusedError) as refused:
        networks.build(distilled(base_model, base_model, "FP32"), base_model, world)
    assert refused.value.message == (
        f"objective.distillation.teacher {base_model} is a llama, which has an unsupported LM head "
        "(the logits differ by 50%): choose another teacher"
    )


@pytest.mark.parametrize("method", ["Full", "LoRA", "PrefixTuning", "PromptTuning"])
def test_the_objective_is_back_after_the_check(base_model: Path, method: str) -> None:
    recipe = networks.recipe(base_model, method={"type": method}, packing=False)
    with networks.alone() as world:
        assert isinstance(networks.build(recipe, base_model, world).objective, Sft)


OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SFT": ({"type": "SFT"}, {"label_smoothing": 0.0}),
    "smoothed SFT": ({"type": "SFT", "labelSmoothing": 0.1}, {"label_smoothing": 0.1}),
    "DPO": ({"type": "DPO"}, {"beta": 0.1, "label_smoothing": 0.0}),
    "smoothed DPO": (
        {"type": "DPO", "dpo": {"beta": 0.3, "labelSmoothing": 0.2}},
        {"beta": 0.3, "label_smoothing": 0.2},
    ),
    "IPO": ({"type": "DPO", "dpo": {"loss": "IPO", "beta": 0.3}}, {"beta": 0.3}),
    "KTO": ({"type": "KTO"}, {"beta": 0.1, "weights": (1.0, 1.0)}),
    "weighted KTO": (
        {"type": "KTO", "kto": {"beta": 0.3, "desirableWeight": 2, "undesirableWeight": 3}},
        {"beta": 0.3, "weights": (2.0, 3.0)},
    ),
    "ORPO": ({"type": "ORPO"}, {"weight": 0.1}),
    "weighted ORPO": ({"type": "ORPO", "orpo": {"weight": 0.3}}, {"weight": 0.3}),
    "SimPO": ({"type": "SimPO"}, {"beta": 2.0, "gamma": 0.5}),
    "SimPO with a margin": (
        {"type": "SimPO", "simpo": {"beta": 3, "gamma": 0.7}},
        {"beta": 3.0, "gamma": 0.7},
    ),
}


@pytest.mark.parametrize(("objective", "expected"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_objective_has_the_parameters_of_the_recipe(
    base_model: Path, objective: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert vars(build.build_objective(networks.recipe(base_model, objective=objective), None)) == expected


@pytest.mark.parametrize("alpha", [None, 5.0])
@pytest.mark.parametrize("method", ["LoRA", "QLoRA"])
def test_embeddings_get_the_noise_of_the_recipe(base_model: Path, method: str, alpha: float | None) -> None:
    recipe = networks.recipe(base_model, method={"type": method}, neftuneAlpha=alpha)
    batch = pack.collate(networks.random_split(examples=2), [[0, 1]], pad_id=0)
    losses = []
    with networks.alone() as world:
        network = networks.build(recipe, base_model, world).train()
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(network(batch)[0].item())
    assert (network.neftune_alpha, losses[0] == losses[1]) == (alpha, alpha is None)


def test_the_output_layer_learns_after_passes_without_gradients(base_model: Path) -> None:
    """The reference and evaluations must leave the root's weights sharded, or nothing trains and keeps them."""
    recipe = networks.recipe(base_model, objective={"type": "DPO"}, learningRate=1e-2)
    split = networks.random_split(documents=2, examples=4)
    with networks.alone() as world:
        network = networks.build(recipe, base_model, world)
        batch = pack.collate(split, [[0, 1, 2, 3]], pad_id=0)
        reference = compute_reference(network, [batch], world, 4)
        assert {type(weight) for weight in trained_parameters(network)} == {DTensor}
        (optimizer,) = build_optimizers(network, recipe.training)
        before = {name: weight.full_tensor().clone() for name, weight in network.named_parameters()}
        loss, _ = network(replace(batch, reference=torch.from_numpy(reference)))
        loss.backward()
        optimizer.step()
        unchanged_weights = [
            name
            for name, weight in network.named_parameters()
            if torch.equal(weight.full_tensor(), before[name])
        ]
    assert unchanged_weights == []


def test_a_teacher_has_a_revision_and_trust_of_its_own(base_model: Path) -> None:
    objective = {"type": "Distillation", "distillation": {"teacher": "org/teacher"}}
    recipe = networks.recipe(base_model, objective=objective)
    trusted = recipe.model.model_copy(update={"trust_remote_code": True, "revision": "v1"})
    teacher_recipe = build.build_teacher_recipe(recipe.model_copy(update={"model": trusted}))
    assert teacher_recipe.model == Model(base="org/teacher")

    objective["distillation"] |= {"teacherRevision": "v2", "teacherTrustRemoteCode": True}  # type: ignore[operator]
    teacher_recipe = build.build_teacher_recipe(networks.recipe(base_model, objective=objective))
    assert teacher_recipe.model == Model(base="org/teacher", revision="v2", trust_remote_code=True)
