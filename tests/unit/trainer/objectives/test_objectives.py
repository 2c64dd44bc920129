"""The losses are those of the libraries that people compare with, and chunks change nothing but memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import LabelSmoother

from finetune_crds import contract
from finetune_crds.objective import Distillation as DistillationSpec
from finetune_crds.objective import Kto as KtoSpec
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network import chunked_loss
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.answers import AnswerObjective, compute_reference
from finetune_trainer.train.objectives.distillation import Distillation, TeacherStates
from finetune_trainer.train.objectives.dpo import Dpo, Ipo
from finetune_trainer.train.objectives.kto import Kto
from finetune_trainer.train.objectives.orpo import Orpo
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.objectives.simpo import Simpo
from support import networks
from support.losses import (
    BETA,
    PRECISIONS,
    TOLERANCES,
    VOCABULARY,
    batch_of,
    check,
    gradients,
    isolated,
    learned_from,
    model,
    padded,
    trl_trainer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.train.data.dataset import Split

PAIRS = 3
JUDGED, KTO = 8, KtoSpec(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("tied", [True, False])
def test_sft_is_the_loss_of_transformers(tied: bool, smoothing: float) -> None:
    split = networks.random_split(vocabulary=VOCABULARY)
    ours = learned_from(Sft(smoothing), isolated(model(tied=tied)), batch_of(split))
    reference = model(tied=tied)
    ids, learned, mask = padded(split, list(range(len(split))))
    labels = ids.masked_fill(~learned.bool(), -100)
    count = (labels[:, 1:] != -100).sum()
    output = reference(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=count)
    smoothed = LabelSmoother(epsilon=smoothing)(output, labels, shift_labels=True)
    check(ours, smoothed if smoothing else output.loss, reference)


# How far bf16 rounds: the gradients of the output layer are summed over 200 targets.
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_smoothed_losses_are_fp32_in_each_precision(precision: torch.dtype, tolerance: float) -> None:
    """The logits of the same network, all at once, and the smoother of transformers."""
    batch = batch_of(networks.random_split(vocabulary=VOCABULARY))
    loss, slopes, _ = learned_from(Sft(0.5), isolated(model(tied=False)).to(precision), batch)
    reference = isolated(model(tied=False)).to(precision)
    network = Network(reference, Sft())
    logits = network.head.compute_logits(batch.at_targets(network.compute_hidden_states(batch)))
    expected = LabelSmoother(epsilon=0.5)({"logits": logits}, batch.at_targets(batch.targets))
    expected.backward()
    assert logits.dtype == torch.float32
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    name = "lm_head.weight"
    scale = slopes[name].abs().max().item()
    torch.testing.assert_close(slopes[name], gradients(reference)[name], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("make_objective", [Sft, lambda smoothing: Dpo(BETA, smoothing)], ids=["SFT", "DPO"])
def test_evaluation_losses_are_without_label_smoothing(make_objective: Callable[[float], Any]) -> None:
    def losses(smoothing: float) -> tuple[float, float]:
        """In training, and in evaluation."""
        network = Network(isolated(model()), make_objective(smoothing))
        batch = dpo()[1] if network.objective.has_reference else sft()[1]
        trained, _ = network(batch)
        with network.no_grad_forward():
            evaluated, _ = network(batch)
        return trained.item(), evaluated.item()

    plain, smoothed = losses(0.0), losses(0.3)
    assert plain[0] == pytest.approx(plain[1], rel=1e-6)
    assert smoothed[1] == plain[1]
    assert abs(smoothed[0] - plain[0]) > 1e-3


def trl_kto(policy: Any, reference: Any, split: Split) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """What TRL's KTOTrainer computes of a batch: its own methods, with what these take of the trainer."""
    from trl import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits"))
    assert split.labels is not None
    inputs: dict[str, torch.Tensor] = {"label": torch.from_numpy(split.labels)}
    for document, prefix in enumerate(("", "KL_")):
        ids, learned, mask = padded(split, [2 * at + document for at in range(len(split))])
        learned[:, 0] = False
        inputs |= {
            f"{prefix}input_ids": ids,
            f"{prefix}attention_mask": mask,
            f"{prefix}completion_mask": learned.long(),
        }
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    trainer = trl_trainer(
        policy,
        reference,
        metrics,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=KTO.desirable_weight,
        undesirable_weight=KTO.undesirable_weight,
    )
    trainer._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, trainer)
    return KTOTrainer._compute_loss(trainer, policy, inputs, False), metrics["train"]


# The other way round, the estimate of the divergence is negative, and 0 is taken.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(("policy_seed", "reference_seed", "diverges"), [(0, 1, True), (1, 0, False)])
def test_kto_is_the_loss_of_trl(
    *, policy_seed: int, reference_seed: int, diverges: bool, precision: torch.dtype
) -> None:
    split = networks.random_split(documents=2, examples=JUDGED, vocabulary=VOCABULARY)
    with networks.alone() as world:
        network = Network(isolated(model(seed=reference_seed)).to(precision), Kto(KTO))
        values = compute_reference(network, [batch_of(split)], world, JUDGED)
    split = dataclasses.replace(split, reference=values)
    objective = Kto(KTO)
    ours = learned_from(objective, isolated(model(seed=policy_seed)).to(precision), batch_of(split))
    theirs = model(seed=policy_seed).to(precision).train()
    loss, metrics = trl_kto(theirs, model(seed=reference_seed).to(precision).eval(), split)
    check(ours, loss, theirs)
    expected = {
        contract.METRIC_REWARD_DESIRABLE: metrics["rewards/chosen"][0],
        contract.METRIC_REWARD_UNDESIRABLE: metrics["rewards/rejected"][0],
        contract.METRIC_REWARD_MARGIN: metrics["rewards/margins"][0],
        contract.METRIC_KL: metrics["kl"][0],
    }
    assert objective.means(ours[2].tolist(), JUDGED) == pytest.approx(expected, rel=TOLERANCES[precision])
    assert set(expected) == set(objective.metrics)
    assert (metrics["kl"][0] > 0) is diverges


def test_kto_has_no_mean_of_what_a_window_has_none_of() -> None:
    objective = Kto(KTO)
    assert objective.means([6.0, 0.0, 3.0, 0.0, 1.5], 3) == {
        contract.METRIC_REWARD_DESIRABLE: 2.0,
        contract.METRIC_KL: 0.5,
    }
    assert objective.means([0.0] * 5, 0) == {contract.METRIC_KL: 0.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.0, 1.0), (3.0, 0.25)])
def test_distillation_is_the_divergence_of_trl(temperature: float, weight: float) -> None:
    """GKD's generalised divergence with beta 0 is KL(teacher || student), without Hinton's T^2."""
    from trl.experimental.gkd import GKDTrainer

    split = networks.random_split(vocabulary=VOCABULARY)
    batch = batch_of(split)
    teacher = Network(isolated(model(seed=1)).requires_grad_(False).eval(), TeacherStates())
    spec = DistillationSpec(teacher="/teacher", temperature=temperature, weight=weight)
    ours = learned_from(Distillation(spec, teacher), isolated(model()), batch)
    student, theirs = model(), model(seed=1)
    ids, learned, mask = padded(split, list(range(len(split))))
    labels = ids.masked_fill(~learned.bool(), -100)[:, 1:]
    logits = student(input_ids=ids, attention_mask=mask).logits[:, :-1]
    with torch.no_grad():
        taught = theirs(input_ids=ids, attention_mask=mask).logits[:, :-1]
    divergence = GKDTrainer.generalized_jsd_loss(
        logits, taught, labels, beta=0, temperature=temperature, num_items_in_batch=(labels != -100).sum()
    )
    data = functional.cross_entropy(logits.transpose(1, 2), labels)
    loss = weight * temperature**2 * divergence + (1 - weight) * data
    check(ours, loss, student)
    assert ours[2].item() / batch.targets_count == pytest.approx(divergence.item(), rel=1e-4)


def sft() -> tuple[Any, pack.Batch]:
    return Sft(), batch_of(networks.random_split(vocabulary=VOCABULARY))


def smoothed_sft() -> tuple[Any, pack.Batch]:
    return Sft(0.2), sft()[1]


def dpo() -> tuple[Any, pack.Batch]:
    split = networks.random_split(documents=2, examples=PAIRS, vocabulary=VOCABULARY)
    reference = torch.full((PAIRS, 2), -30.0).numpy()
    return Dpo(BETA), batch_of(dataclasses.replace(split, reference=reference))


def ipo() -> tuple[Any, pack.Batch]:
    return Ipo(BETA), dpo()[1]


def orpo() -> tuple[Any, pack.Batch]:
    return Orpo(BETA), dpo()[1]


def simpo() -> tuple[Any, pack.Batch]:
    return Simpo(BETA, 0.5), dpo()[1]


def kto() -> tuple[Any, pack.Batch]:
    split = networks.random_split(documents=2, examples=JUDGED, vocabulary=VOCABULARY)
    reference = torch.full((JUDGED, 2), -60.0).numpy()
    return Kto(KTO), batch_of(dataclasses.replace(split, reference=reference))


def distillation() -> tuple[Any, pack.Batch]:
    teacher = Network(isolated(model(seed=1)).requires_grad_(False).eval(), TeacherStates())
    spec = DistillationSpec(teacher="/teacher", temperature=2.0)
    return Distillation(spec, teacher), batch_of(networks.random_split(vocabulary=VOCABULARY))


MADE = [sft, smoothed_sft, dpo, ipo, orpo, simpo, kto, distillation]


@pytest.mark.parametrize("make_case", MADE)
def test_chunks_change_neither_loss_nor_gradients(
    make_case: Callable[[], tuple[Any, pack.Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch = make_case()
    results_by_chunks = []
    for tokens in (1, 7, 10_000):
        monkeypatch.setattr(chunked_loss, "SMALL_CHUNK_NUMBERS", tokens * VOCABULARY)
        results_by_chunks.append(learned_from(objective, isolated(model()), batch))
    for loss, slopes, metrics in results_by_chunks[:-1]:
        assert loss == pytest.approx(results_by_chunks[-1][0], rel=1e-5)
        torch.testing.assert_close(metrics, results_by_chunks[-1][2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slopes, results_by_chunks[-1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make_case", MADE)
def test_a_batch_without_targets_has_a_loss_of_nothing(
    make_case: Callable[[], tuple[Any, pack.Batch]],
) -> None:
    """With which a rank keeps the others company: the same collectives, and gradients of zero."""
    objective, full = make_case()
    split = networks.random_split(documents=1 if full.reference is None else 2, vocabulary=VOCABULARY)
    split = (
        split if full.reference is None else dataclasses.replace(split, reference=torch.zeros(16, 2).numpy())
    )
    network = Network(isolated(model()), objective)
    loss, _ = network(pack.collate(split, [], pad_id=0))
    loss.backward()
    assert loss.item() == 0.0
    assert all(not slope.any() for slope in gradients(network.model).values())


def test_evaluation_makes_no_gradient() -> None:
    objective, batch = sft()
    network = Network(isolated(model()), objective)
    with torch.no_grad():
        evaluated, _ = network(batch)
    trained, _ = network(batch)
    assert not evaluated.requires_grad
    assert evaluated.item() == pytest.approx(trained.item(), rel=1e-5)


class Largest(TorchDispatchMode):
    """Sees the largest tensor that any operation returns, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


@pytest.mark.parametrize("objective", [Sft(), Sft(0.2), Dpo(BETA), Orpo(BETA), Kto(KTO)])
def test_the_whole_matrix_of_logits_is_never_made(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 50_000
    monkeypatch.setattr(chunked_loss, "SMALL_CHUNK_NUMBERS", 16 * vocabulary)
    pairs = 2 if isinstance(objective, AnswerObjective) else 1
    split = networks.random_split(documents=pairs, examples=16 // pairs, vocabulary=vocabulary)
    split = dataclasses.replace(split, reference=torch.zeros(len(split), 2).numpy() if pairs == 2 else None)
    batch = batch_of(split)
    network = isolated(model(vocabulary=vocabulary))
    with Largest() as largest:
        Network(network, objective)(batch)[0].backward()
    embedding = network.get_input_embeddings().weight.numel()
    assert largest.numbers == max(embedding, 16 * vocabulary)
    assert batch.targets_count * vocabulary > 5 * largest.numbers
