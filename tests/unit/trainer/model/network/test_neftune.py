"""Noise on embeddings: that of transformers, for each document of a pack by itself, and in training alone."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.neftune import activate_neftune

from finetune_trainer.train.model.network import neftune
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.sft import Sft
from support import networks
from support.losses import VOCABULARY, batch_of, check, isolated, learned_from, model, padded

ALPHA, WIDTH = 5.0, 1000


def test_documents_of_one_length_learn_as_in_transformers() -> None:
    split = networks.of_documents(*([7 * row + at + 2 for at in range(12)] for row in range(4)))
    batch = batch_of(split, packing=False)
    ours = isolated(model())
    torch.manual_seed(3)
    learned = learned_from(Sft(), ours, batch, ALPHA)
    reference = model().train()
    activate_neftune(reference, ALPHA)
    ids, _, attention_mask = padded(split, [*range(4)])
    torch.manual_seed(3)
    check(learned, reference(input_ids=ids, attention_mask=attention_mask, labels=ids).loss, reference)
    plain, _, _ = learned_from(Sft(), isolated(model()), batch)
    assert abs(learned[0] - plain) > 1e-3


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", [True, False])
def test_noise_depends_on_the_length_of_the_document_alone(*, packing: bool, precision: torch.dtype) -> None:
    split = networks.of_documents([2] * 4, [3] * 16, [4] * 25)
    batch = batch_of(split, packing=packing)
    torch.manual_seed(0)
    words = torch.zeros(*batch.input_ids.shape, WIDTH, dtype=precision)
    noisy = neftune.add_noise(words, batch, ALPHA)
    assert noisy.dtype == precision
    for word, length in ((2, 4), (3, 16), (4, 25)):
        noise = noisy[batch.input_ids == word].float()
        greatest = ALPHA / math.sqrt(length * WIDTH)
        assert noise.abs().max().item() == pytest.approx(greatest, rel=0.02)
        # Of the uniform distribution; the mean is 0.
        assert noise.std().item() == pytest.approx(greatest / math.sqrt(3), rel=0.02)


def test_an_evaluation_has_no_noise() -> None:
    batch = batch_of(networks.random_split(vocabulary=VOCABULARY))
    network = Network(isolated(model()), Sft(), ALPHA).train()
    with network.no_grad_forward():
        evaluated, _ = network(batch)
    plain = Network(isolated(model()), Sft())
    expected, _ = plain(batch)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    first, second = (network.train()(batch)[0].item() for _ in range(2))
    assert len({first, second, evaluated.item()}) == 3
    assert not network.base.get_input_embeddings()._forward_hooks
