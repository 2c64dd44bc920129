"""A reward model is judged by the pairs that it ranks correctly, on both answers of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune_trainer.evaluate import evaluation, rewards
from support.cells import WARNINGS
from support.evaluations import recipe, save_adapter, save_splits
from support.pods import preferences
from support.reward_models import load_reward_adapter, save_reward_adapter, save_reward_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
Json = dict[str, Any]
REWARDS: Json = {"type": "RewardModel"}
PAIRS: Json = {"type": "Preference", "margin": "gap"}


def pairs() -> list[Json]:
    rows = [{**row, "gap": at % 3 / 2} for at, row in enumerate(preferences())]
    return [{**row, "split": "test" if at % 10 == 1 else row["split"]} for at, row in enumerate(rows)]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splits(tmp_path_factory.mktemp("judged") / "splits", pairs())


def score_by_hand(model: Any, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards of the test split [pairs, 2] by plain forward passes, each document alone, and the margins."""
    rows = [row for row in pairs() if row["split"] == "test"]
    scores = []
    for answer in (row[name] for row in rows for name in ("chosen", "rejected")):
        prompt = next(row["prompt"] for row in rows if answer in (row["chosen"], row["rejected"]))
        ids = [*tokenizer(prompt).input_ids, *tokenizer(answer).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            scores.append(model.eval()(input_ids=torch.tensor([ids])).logits[0, 0])
    return torch.stack(scores).view(-1, 2), torch.tensor([row["gap"] for row in rows])


def expect(model: Any, tokenizer: Any) -> dict[str, float]:
    scores, margins = score_by_hand(model, tokenizer)
    differences = scores[:, 0] - scores[:, 1]
    return {
        "evaluation_loss": -functional.logsigmoid(differences - margins).mean().item(),
        "eval_accuracy": (differences > 0).float().mean().item(),
    }


def test_a_version_and_its_base_are_judged_on_the_same_pairs(
    base_model: Path, splits: Path, tmp_path: Path
) -> None:
    """The version is an adapter of a language model, and the base is that model with the score head of the first step."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    adapter = save_reward_adapter(base_model, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    evaluated = recipe(
        base_model, splits, {"batchSize": 3}, columns=PAIRS, objective=REWARDS, method={"type": "LoRA"}
    )
    result = evaluation.run(evaluated, str(adapter))
    assert result.rows == 8
    assert result.metrics == pytest.approx(expect(load_reward_adapter(adapter), tokenizer), rel=1e-4)
    assert result.base.keys() == result.metrics.keys()

    # A reward model as the base has a score head of its own.
    base = save_reward_model(base_model, tmp_path / "rewards")
    evaluated = recipe(base, splits, {"metrics": ["Accuracy"]}, columns=PAIRS, objective=REWARDS)
    expected = expect(AutoModelForSequenceClassification.from_pretrained(base), tokenizer)
    own = evaluation.run(evaluated, str(base))
    assert own.metrics == own.base == {"eval_accuracy": pytest.approx(expected["eval_accuracy"])}


def test_the_base_of_a_reward_model_may_be_the_adapter_of_a_language_model(
    base_model: Path, splits: Path, tmp_path: Path
) -> None:
    sft = save_adapter(base_model, tmp_path / "sft")
    version = save_reward_model(base_model, tmp_path / "rewards")
    result = evaluation.run(recipe(sft, splits, columns=PAIRS, objective=REWARDS), str(version))
    assert result.base["evaluation_loss"] != pytest.approx(result.metrics["evaluation_loss"], rel=1e-3)


def test_numbers_of_rewards_and_of_answers_are_not_comparable(
    base_model: Path, splits: Path, tmp_path: Path
) -> None:
    without_margins = save_splits(
        tmp_path / "plain", [{name: row[name] for name in row if name != "gap"} for row in pairs()]
    )
    reward_model = save_reward_model(base_model, tmp_path / "rewards")
    spec = {"baseModel": False}
    plain = {"type": "Preference"}
    digests = [
        evaluation.run(
            recipe(reward_model, table, spec, columns=columns, objective=objective), str(model)
        ).digest
        for table, columns, objective, model in (
            (splits, PAIRS, REWARDS, reward_model),
            (without_margins, plain, REWARDS, reward_model),
            (without_margins, plain, {"type": "DPO"}, base_model),
        )
    ]
    assert len({*digests}) == 3


def test_equal_rewards_rank_no_pair_correctly() -> None:
    numbers = rewards.compute_metrics(["Loss", "Accuracy"], torch.tensor([[2.0, 2.0], [3.0, 1.0]]), None)
    losses = functional.softplus(torch.tensor([0.0, -2.0]))
    assert numbers == {"evaluation_loss": pytest.approx(losses.mean().item()), "eval_accuracy": 0.5}
    assert rewards.compute_metrics(["Loss"], torch.tensor([[2.0, 1.0]]), np.array([1.0], np.float32)) == {
        "evaluation_loss": pytest.approx(0.6931, rel=1e-3)
    }
