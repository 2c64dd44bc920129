"""The losses are those of the libraries that people compare with, and chunks change nothing but memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune_crds.training import Distillation as DistillationSpec
from finetune_trainer.train.data import pack
from finetune_trainer.train.model import attention, chunks
from finetune_trainer.train.model.network import Network
from finetune_trainer.train.objectives.distillation import Distillation, TeacherStates
from finetune_trainer.train.objectives.dpo import Dpo, reference_of
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.train.data.dataset import Split

VOCABULARY, PAIRS, BETA = 96, 3, 0.3


def model(seed: int = 0, vocabulary: int = VOCABULARY, *, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            max_position_embeddings=128,
        )
    )
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return made


def isolated(made: Any) -> Any:
    attention.isolate(made, cuda=False, half=False, soft_prompt=False)
    return made


def batch_of(split: Split) -> pack.Batch:
    rows = pack.sequences(split.lengths, max_length=64, packing=True)
    return pack.collate(split, rows, pad_id=0)


def padded(split: Split, documents: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row a document as other trainers have them: ids, whether a token is learned, and whether it is there."""
    parts = [slice(*split.offsets[number : number + 2]) for number in documents]
    ids = [torch.from_numpy(split.tokens[part]).long() for part in parts]
    learned = [torch.from_numpy(split.loss_mask[part]) for part in parts]
    there = [torch.ones_like(row) for row in ids]
    padded_rows = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (ids, learned, there)]
    return padded_rows[0], padded_rows[1], padded_rows[2]


def gradients(made: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in made.named_parameters()}


def learned_from(
    objective: Any, made: Any, batch: pack.Batch
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Mean loss of a batch, its gradients, and metrics."""
    network = Network(made, objective)
    loss, metrics = network(batch)
    mean = loss / objective.count(batch)
    mean.backward()
    return mean.item(), gradients(made), metrics


def check(found: tuple[float, dict[str, torch.Tensor], Any], loss: torch.Tensor, reference: Any) -> None:
    loss.backward()
    assert found[0] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(found[1], gradients(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_sft_is_the_loss_of_transformers(tied: bool) -> None:
    split = networks.random_split(vocabulary=VOCABULARY)
    found = learned_from(Sft(), isolated(model(tied=tied)), batch_of(split))
    reference = model(tied=tied)
    ids, learned, there = padded(split, list(range(len(split))))
    labels = ids.masked_fill(~learned.bool(), -100)
    count = (labels[:, 1:] != -100).sum()
    loss = reference(input_ids=ids, attention_mask=there, labels=labels, num_items_in_batch=count).loss
    check(found, loss, reference)


def trl_dpo(policy: Any, reference: Any, split: Split) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """What TRL's DPOTrainer computes of a batch: its own method, with what that takes of the trainer."""
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    pairs = range(len(split))
    ids, learned, there = padded(split, [*(2 * at for at in pairs), *(2 * at + 1 for at in pairs)])
    learned[:, 0] = False
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": ids, "attention_mask": there, "completion_mask": learned.long()}
    return DPOTrainer._compute_loss(trainer, policy, inputs, False), metrics["train"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_dpo_is_the_loss_of_trl() -> None:
    """Trap 7: the reference is the model before its first step, and needs no second model in memory."""
    split = networks.random_split(documents=2, examples=PAIRS, vocabulary=VOCABULARY)
    policy = isolated(model())
    with networks.alone() as world:
        network = Network(policy, Dpo(BETA))
        values = reference_of(network, [batch_of(split)], world, PAIRS)
        assert isinstance(network.objective, Dpo)
    split = dataclasses.replace(split, reference=values)
    # The policy has learned something since.
    policy.load_state_dict(model(seed=1).state_dict())
    found = learned_from(Dpo(BETA), policy, batch_of(split))
    theirs = model(seed=1).train()
    loss, metrics = trl_dpo(theirs, model().eval(), split)
    check(found, loss, theirs)
    margins, right = (found[2] / PAIRS).tolist()
    assert [margins, right] == pytest.approx(
        [metrics["rewards/margins"][0], metrics["rewards/accuracies"][0]], rel=1e-4
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.0, 1.0), (3.0, 0.25)])
def test_distillation_is_the_divergence_of_trl(temperature: float, weight: float) -> None:
    """GKD's generalised divergence with beta 0 is KL(teacher || student), without Hinton's T^2."""
    from trl.experimental.gkd import GKDTrainer

    split = networks.random_split(vocabulary=VOCABULARY)
    batch = batch_of(split)
    teacher = Network(isolated(model(seed=1)).requires_grad_(False).eval(), TeacherStates())
    spec = DistillationSpec(teacher="/teacher", temperature=temperature, weight=weight)
    found = learned_from(Distillation(spec, teacher), isolated(model()), batch)
    student, theirs = model(), model(seed=1)
    ids, learned, there = padded(split, list(range(len(split))))
    labels = ids.masked_fill(~learned.bool(), -100)[:, 1:]
    logits = student(input_ids=ids, attention_mask=there).logits[:, :-1]
    with torch.no_grad():
        taught = theirs(input_ids=ids, attention_mask=there).logits[:, :-1]
    divergence = GKDTrainer.generalized_jsd_loss(
        logits, taught, labels, beta=0, temperature=temperature, num_items_in_batch=(labels != -100).sum()
    )
    data = functional.cross_entropy(logits.transpose(1, 2), labels)
    loss = weight * temperature**2 * divergence + (1 - weight) * data
    check(found, loss, student)
    assert found[2].item() / batch.targets_count == pytest.approx(divergence.item(), rel=1e-4)


def sft() -> tuple[Any, pack.Batch]:
    return Sft(), batch_of(networks.random_split(vocabulary=VOCABULARY))


def dpo() -> tuple[Any, pack.Batch]:
    split = networks.random_split(documents=2, examples=PAIRS, vocabulary=VOCABULARY)
    reference = torch.full((PAIRS, 2), -30.0).numpy()
    return Dpo(BETA), batch_of(dataclasses.replace(split, reference=reference))


def distillation() -> tuple[Any, pack.Batch]:
    teacher = Network(isolated(model(seed=1)).requires_grad_(False).eval(), TeacherStates())
    spec = DistillationSpec(teacher="/teacher", temperature=2.0)
    return Distillation(spec, teacher), batch_of(networks.random_split(vocabulary=VOCABULARY))


@pytest.mark.parametrize("made", [sft, dpo, distillation])
def test_chunks_change_neither_loss_nor_gradients(
    made: Callable[[], tuple[Any, pack.Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, batch = made()
    found = []
    for tokens in (1, 7, 10_000):
        monkeypatch.setattr(chunks, "CHUNK_NUMBERS", tokens * VOCABULARY)
        assert len(list(chunks.slices(batch.targets_count, VOCABULARY))) == -(-batch.targets_count // tokens)
        found.append(learned_from(objective, isolated(model()), batch))
    for loss, slopes, metrics in found[:-1]:
        assert loss == pytest.approx(found[-1][0], rel=1e-5)
        torch.testing.assert_close(metrics, found[-1][2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slopes, found[-1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("made", [sft, dpo, distillation])
def test_a_batch_without_targets_has_a_loss_of_nothing(made: Callable[[], tuple[Any, pack.Batch]]) -> None:
    """With which a rank keeps the others company: the same collectives, and gradients of zero."""
    objective, full = made()
    split = networks.random_split(documents=2 if made is dpo else 1, vocabulary=VOCABULARY)
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


@pytest.mark.parametrize("objective", [Sft(), Dpo(BETA)])
def test_the_whole_matrix_of_logits_is_never_made(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 50_000
    monkeypatch.setattr(chunks, "CHUNK_NUMBERS", 16 * vocabulary)
    pairs = 2 if isinstance(objective, Dpo) else 1
    split = networks.random_split(documents=pairs, examples=16 // pairs, vocabulary=vocabulary)
    split = dataclasses.replace(split, reference=torch.zeros(len(split), 2).numpy() if pairs == 2 else None)
    batch = batch_of(split)
    made = isolated(model(vocabulary=vocabulary))
    with Largest() as largest:
        Network(made, objective)(batch)[0].backward()
    embedding = made.get_input_embeddings().weight.numel()
    assert largest.numbers == max(embedding, 16 * vocabulary)
    assert batch.targets_count * vocabulary > 5 * largest.numbers
