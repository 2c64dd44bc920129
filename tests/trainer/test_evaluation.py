"""From training to the evaluation of the registered version: real worker, real MLflow, real command."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.contract import TerminationMessage
from finetune_trainer.evaluate.__main__ import main
from support.cells import WARNINGS
from support.evaluations import rows_of_splits, save_model, save_splits
from support.training import eval_loss_of

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.evaluation import EvaluationResult
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


def evaluated(pod: Pod, model: str) -> EvaluationResult:
    """Run the command on a pod's recipe."""
    on_sigterm, told = signal.getsignal(signal.SIGTERM), pod.folder / "evaluation.json"
    environment = {
        **pod.env,
        "FINETUNE_RECIPE": str(pod.folder / "recipe.yaml"),
        "FINETUNE_TERMINATION_PATH": str(told),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            assert main(["--model", model]) == 0
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    message = TerminationMessage.parse(told.read_text())
    assert message is not None
    assert message.evaluation is not None
    return message.evaluation


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
    found = evaluated(pod, "models:/tiny/1")
    assert found.rows == 4
    # The loss is that which training found on the same rows.
    assert found.metrics["evaluation_loss"] == pytest.approx(eval_loss_of(trained), rel=1e-4)
    assert trained.message is not None
    assert trained.message.train is not None
    assert found.base["evaluation_loss"] == pytest.approx(trained.message.train.base_eval_loss, rel=1e-4)
    assert found.base["eval_exact_match"] == 0.0
    assert found.metrics["eval_exact_match"] > 0.9
    assert found.metrics["eval_accuracy"] > 0.9
    (path,) = pod.folder.glob("artifacts/**/generations.json")
    table = json.loads(path.read_text())
    assert (table["columns"], len(table["data"])) == (["prompt", "reference", "base", "model"], 3)
    assert all(base != reference == model for _, reference, base, model in table["data"])
