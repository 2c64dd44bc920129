"""The judge of registered models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from e2e import judge
from support.pods import examples, save_base_model, train_by_hand

ROWS = [row for row in examples() if row["split"] == "validation"]


def losses(base: Path) -> tuple[float, float]:
    """The judge's loss, and the mean over all answers' tokens of the one that transformers computes."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    total, count = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"]).input_ids
        whole = [*prompt, *tokenizer(f"{row['response']}<eos>").input_ids]
        labels = [-100] * len(prompt) + whole[len(prompt) :]
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss
        total, count = total + loss.item() * (len(whole) - len(prompt)), count + len(whole) - len(prompt)
    return judge.loss(model.eval(), tokenizer, ROWS), total / count


def test_a_base_model_is_not_taken_for_a_tuned_one(tmp_path: Path) -> None:
    save_base_model(tmp_path)
    base, expected = losses(tmp_path)
    assert base == pytest.approx(expected, rel=1e-5)
    train_by_hand(tmp_path, steps=30)
    tuned, expected = losses(tmp_path)
    assert tuned == pytest.approx(expected, rel=1e-5)
    assert tuned < 0.85 * base
