"""Losses of a tiny model on random examples, and TRL's of the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.trained_network import Network

if TYPE_CHECKING:
    from finetune_trainer.train.data.dataset import Split

VOCABULARY, BETA = 96, 0.3


def model(seed: int = 0, vocabulary: int = VOCABULARY, *, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    llama = LlamaForCausalLM(
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
        for weight in llama.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return llama


def isolated(tested_model: Any) -> Any:
    attention.isolate(tested_model, card=None, half=False, soft_prompt=False)
    return tested_model


def batch_of(split: Split, *, packing: bool = True) -> pack.Batch:
    """All examples, in one batch."""
    rows = pack.pack_examples(split.lengths, max_length=64, packing=packing)
    return pack.collate(split, rows, pad_id=0)


def padded(split: Split, documents: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row a document as other trainers have them: ids, whether a token is learned, and whether it is there."""
    parts = [slice(*split.offsets[number : number + 2]) for number in documents]
    ids = [torch.from_numpy(split.tokens[part]).long() for part in parts]
    learned = [torch.from_numpy(split.loss_mask[part]) for part in parts]
    attention_mask = [torch.ones_like(row) for row in ids]
    padded_rows = [
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (ids, learned, attention_mask)
    ]
    return padded_rows[0], padded_rows[1], padded_rows[2]


def gradients(network: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in network.named_parameters()}


def learned_from(
    objective: Any, tested_model: Any, batch: pack.Batch, neftune_alpha: float | None = None
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Mean loss of a batch, its gradients, and metrics."""
    network = Network(tested_model, objective, neftune_alpha)
    loss, metrics = network(batch)
    mean = loss / objective.count(batch)
    mean.backward()
    return mean.item(), gradients(tested_model), metrics


# How far losses and rewards may be apart, and gradients as a share of all of them together: bf16 rounds to 1/256.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
PRECISIONS = tuple(TOLERANCES)


def check(learned: tuple[float, dict[str, torch.Tensor], Any], loss: torch.Tensor, reference: Any) -> None:
    """Compare a mean loss and its gradients with those of a reference, whose loss has no gradients so far."""
    loss.backward()
    tolerance = TOLERANCES[reference.dtype]
    assert learned[0] == pytest.approx(loss.item(), rel=tolerance)
    expected = gradients(reference)
    if reference.dtype == torch.float32:
        torch.testing.assert_close(learned[1], expected, rtol=1e-4, atol=1e-5)
        return
    everything = torch.nn.utils.get_total_norm([*expected.values()])
    distances = {
        name: ((learned[1][name] - slope).norm() / everything).item() for name, slope in expected.items()
    }
    assert max(distances.values()) < tolerance, distances


def trl_trainer(policy: Any, reference: Any, metrics: Any, **options: Any) -> SimpleNamespace:
    """What the methods of TRL's trainers take of the trainer."""
    return SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        beta=BETA,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )
