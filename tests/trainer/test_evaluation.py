"""From training to the evaluation of the registered version: real worker, real MLflow, real command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.cells import WARNINGS
from support.evaluations import evaluate, rows_of_splits, save_model, save_splits
from support.training import eval_loss_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]


@pytest.fixture
def memorised(tmp_path: Path) -> Path:
    """Splits that all have the same rows: what training has seen is what is evaluated."""
    rows: list[dict[str, Any]] = [row for row in rows_of_splits() if row["split"] == "train"][:4]
    splits = [{**row, "split": name} for row in rows for name in ("train", "validation", "test")]
    return save_splits(tmp_path / "memorised", splits)


def test_a_trained_adapter_answers_where_its_base_does_not(
    pod: Pod, mlflow: Mlflow, base_model: Path, memorised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(base_model, pod.folder / "base", width=64, deviation=0.2)
    pod = pod.but(
        {
            "model.base": str(base),
            "data.splits": {"type": "Delta", "path": str(memorised), "version": 0},
            "method": {"type": "LoRA", "lora": {"rank": 16, "alpha": 32, "dropout": 0.0}},
            "training.learningRate": 0.005,
            "training.maxSteps": 100,
            "register": {"model": "tiny"},
            "evaluation": {
                "metrics": ["Loss", "ExactMatch", "Accuracy", "F1"],
                "maxNewTokens": 16,
                "generations": 3,
            },
        }
    )
    pod.env |= mlflow.env
    trained = pod.run_here(capsys)
    assert trained.code == 0, trained
    evaluation = evaluate(pod, "models:/tiny/1")
    assert evaluation.rows == 4
    # The loss is that which training found on the same rows.
    assert evaluation.metrics["evaluation_loss"] == pytest.approx(eval_loss_of(trained), rel=1e-4)
    assert trained.message is not None
    assert trained.message.train is not None
    assert evaluation.base["evaluation_loss"] == pytest.approx(trained.message.train.base_eval_loss, rel=1e-4)
    assert evaluation.base["eval_exact_match"] == 0.0
    assert evaluation.metrics["eval_exact_match"] > 0.9
    assert evaluation.metrics["eval_accuracy"] > 0.9
    (path,) = pod.folder.glob("artifacts/**/generations.json")
    table = json.loads(path.read_text())
    assert (table["columns"], len(table["data"])) == (["prompt", "reference", "base", "model"], 3)
    assert all(base != reference == model for _, reference, base, model in table["data"])
