"""Reward models on ranks beside TRL, and from a recipe to rewards that transformers, peft and MLflow compute alike."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch

from finetune_trainer.train.data import pack
from support import networks, pods
from support.cells import WARNINGS, exported, rewards
from support.evaluations import evaluate
from support.losses import trl_trainer
from support.reward_models import save_reward_model
from support.training import eval_loss_of, history

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
Json = dict[str, Any]
PAIRS, PAD, COEFFICIENT = 6, 1, 0.1
# A loss and the share by which gradients may differ: bf16 rounds to 1/256.
TOLERANCES = {"FP32": 1e-4, "BF16": 2e-2}


def pairs() -> Split:
    split = networks.random_split(documents=2, examples=PAIRS)
    return replace(split, margins=np.linspace(-1, 1, PAIRS).astype(np.float32))


def learn_with_trl(base: Path, split: Split) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of TRL's RewardTrainer in FP32 and its gradients, on all pairs in one padded batch."""
    from transformers import AutoModelForSequenceClassification
    from trl import RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32).train()
    documents = [
        split.tokens[begin:end].tolist() for begin, end in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    assert split.margins is not None
    batch = DataCollatorForPreference(pad_token_id=PAD)(
        [
            {"chosen_ids": chosen, "rejected_ids": rejected, "margin": float(margin)}
            for chosen, rejected, margin in zip(documents[::2], documents[1::2], split.margins, strict=True)
        ]
    )
    from collections import defaultdict

    trainer = trl_trainer(model, None, {"train": defaultdict(list)})
    trainer.args = SimpleNamespace(center_rewards_coefficient=COEFFICIENT)
    loss = RewardTrainer.compute_loss(trainer, model, dict(batch))
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def learn_as_trl(world: World, case: tuple[Path, str]) -> None:
    base, precision = case
    split = pairs()
    expected_loss, expected = learn_with_trl(base, split)
    everything = torch.nn.utils.get_total_norm([*expected.values()])
    objective = {"type": "RewardModel", "rewardModel": {"centerRewardsCoefficient": COEFFICIENT}}
    for packing in (True, False):
        recipe = networks.recipe(base, objective=objective, precision=precision, packing=packing)
        network = networks.build(recipe, base, world).train()
        sequences = pack.pack_examples(split.lengths, max_length=128, packing=packing)
        own = [row for rows in pack.split_among_ranks(sequences, rank=world.rank, ranks=world.size, batch_size=8) for row in rows]  # fmt: skip
        loss, _ = network(pack.collate(split, own, pad_id=PAD))
        (loss / PAIRS).backward()
        (summed,) = world.sum_over_ranks(loss.item())
        assert summed / PAIRS == pytest.approx(expected_loss, rel=TOLERANCES[precision])
        slopes: dict[str, Any] = {name: weight.grad for name, weight in network.model.named_parameters()}
        assert slopes.keys() == expected.keys()
        for name, slope in slopes.items():
            distance = (slope.full_tensor() - expected[name]).norm() / everything
            assert distance < TOLERANCES[precision], (name, packing, distance)


@pytest.mark.parametrize(("ranks", "precision"), [(1, "BF16"), (2, "FP32"), (2, "BF16")])
def test_ranks_compute_the_loss_and_the_gradients_of_trl(
    base_model: Path, tmp_path: Path, ranks: int, precision: str
) -> None:
    """On two ranks, the score head has one row, which the first rank has."""
    base = save_reward_model(base_model, tmp_path / "base")
    networks.on_ranks(ranks, tmp_path / "rendezvous", learn_as_trl, (base, precision))


def save_pairs(folder: Path) -> Path:
    """The preferences, with margins, and with a test split."""
    import pyarrow as pa
    from deltalake import write_deltalake

    rows = [{**row, "gap": at % 3 / 4} for at, row in enumerate(pods.preferences())]
    for at, row in enumerate(rows):
        row["split"] = "test" if at % 10 == 1 else row["split"]
    write_deltalake(str(folder), pa.Table.from_pylist(rows))
    return folder


def test_from_a_recipe_to_rewards(pod: Pod, mlflow_of_test: Mlflow, tmp_path: Path) -> None:
    """Two ranks train an adapter, which is merged, loaded, served and judged."""
    import mlflow
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    table = save_pairs(tmp_path / "pairs")
    pod = pod.but(
        {
            "objective": {"type": "RewardModel", "rewardModel": {"centerRewardsCoefficient": 0.01}},
            "method": {"type": "LoRA", "lora": {"rank": 8}, "export": "Merged"},
            "data": {
                "columns": {"type": "Preference", "margin": "gap"},
                "splits": {"type": "Delta", "path": str(table), "version": 0},
            },
            "training.maxSteps": 8,
            "training.learningRate": 0.02,
            "training.perDeviceBatchSize": 4,
            "training.evalEverySteps": 4,
            "training.select": "Best",
            "training.monitor": "Accuracy",
            "distributed.processesPerNode": 2,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 4},
            "evaluation": {},
            "register": {"model": "rewards", "aliases": []},
        }
    )
    pod.env |= mlflow_of_test.env
    pod.forked = True
    outcome = pod.run()
    assert outcome.code == 0, outcome.output
    assert outcome.message is not None
    assert outcome.message.train is not None
    before, reported = outcome.message.train.base_eval_loss, eval_loss_of(outcome)
    assert before is not None
    assert reported < before
    accuracy = history(mlflow_of_test, "eval_reward_accuracy")
    assert [*accuracy] == [0, 4, 8]
    assert max(accuracy.values()) > accuracy[0]

    # The weights that transformers loads are those that training evaluated.
    folder = exported(pod, "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = rewards(model, pod)
    assert (scores[:, 0] > scores[:, 1]).float().mean().item() == pytest.approx(max(accuracy.values()))
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["pad_token_id"]) == (["LlamaForSequenceClassification"], PAD)
    assert not (folder / "generation_config.json").exists()

    # MLflow's server takes named inputs, and computes the rewards of a padded batch.
    rows = [{"prompt": "What is the red house? ", "response": text} for text in ("Red.", "The house is red.")]
    ids = [[*tokenizer(row["prompt"]).input_ids, *tokenizer(row["response"]).input_ids, 0] for row in rows]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0].tolist()
    served = mlflow.pyfunc.load_model("models:/rewards/1")
    assert served.metadata.get_input_schema().input_names() == ["prompt", "response"]
    assert served.metadata.get_output_schema().input_names() == ["reward"]
    assert served.predict(pd.DataFrame(rows))["reward"].tolist() == pytest.approx(expected, rel=1e-4)

    # The evaluation judges the test split, and the base with the score head of the first step.
    result = evaluate(pod, "models:/rewards/1")
    assert result.rows == 8
    assert result.metrics.keys() == result.base.keys() == {"evaluation_loss", "eval_accuracy"}
    assert result.metrics != result.base


def test_another_attempt_and_another_job_go_on_with_the_score_head(
    pod: Pod, preferences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = {"type": "Delta", "path": str(preferences), "version": 0}
    pod = pod.but(
        {
            "objective": {"type": "RewardModel"},
            "data": {"columns": {"type": "Preference"}, "splits": splits},
            "training.maxSteps": 2,
        }
    )
    first = pod.but(
        {"checkpoint": {"uri": str(tmp_path / "checkpoints")}, "output": {"uri": str(tmp_path / "output")}}
    )
    outcome = first.run_here(capsys)
    assert outcome.code == 0, outcome
    # A second attempt trains no step: the checkpoint has the score head.
    again = first.run_here(capsys)
    assert (again.code, again.losses) == (0, {}), again
    assert eval_loss_of(again) == pytest.approx(eval_loss_of(outcome), rel=1e-5)
    # The next job starts from the reward model: its score head is trained further.
    following = pod.but({"model.base": str(tmp_path / "output"), "training.maxSteps": 1}).run_here(capsys)
    assert following.code == 0, following
    assert following.message is not None
    assert following.message.train is not None
    assert following.message.train.base_eval_loss == pytest.approx(eval_loss_of(outcome), rel=1e-4)
