"""`finetune-evaluate` from the recipe to its termination message, on models in folders."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds import contract
from finetune_crds.contract import TerminationMessage
from finetune_crds.evaluation import EvaluationResult
from finetune_trainer.evaluate.__main__ import main
from support.cells import WARNINGS
from support.evaluations import recipe, save_adapter, save_splits
from support.trackers import read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from support.training import Mlflow

    Evaluate = Callable[..., tuple[int, TerminationMessage | None]]

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
    # MLflow's own use of SQLAlchemy, and its engine, which it never closes.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splits(tmp_path_factory.mktemp("evaluated") / "splits")


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Evaluate]:
    """Runs the command on a recipe and a model, and returns its exit code and its message."""
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def run(recipe: Recipe, model: Path, *more: str, **env: str) -> tuple[int, TerminationMessage | None]:
        (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
        message_file = tmp_path / "termination.json"
        message_file.unlink(missing_ok=True)
        usual = {
            "FINETUNE_RECIPE": str(tmp_path / "recipe.yaml"),
            "FINETUNE_TERMINATION_PATH": str(message_file),
            "FINETUNE_MLFLOW_PATIENCE_SECONDS": "60",
        }
        for name, value in (usual | env).items():
            monkeypatch.setenv(name, value)
        code = main(["--model", str(model), *more])
        return code, TerminationMessage.parse(message_file.read_text()) if message_file.exists() else None

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)


def result_of(ended: tuple[int, TerminationMessage | None]) -> EvaluationResult:
    code, message = ended
    assert code == 0, message
    assert message is not None
    assert message.evaluation is not None
    return message.evaluation


ALL = ["Loss", "Perplexity", "ExactMatch", "Accuracy", "F1", "Rouge", "Bleu"]


def test_an_evaluation_measures_both_models_and_logs_their_answers(
    evaluate: Evaluate,
    base_model: Path,
    splits: Path,
    tmp_path: Path,
    mlflow: Mlflow,
) -> None:
    evaluated = recipe(base_model, splits, {"metrics": ALL, "generations": 3, "maxNewTokens": 4})
    adapter = save_adapter(base_model, tmp_path / "adapter")
    evaluation = result_of(evaluate(evaluated, adapter, **mlflow.env))
    assert (evaluation.rows, len(evaluation.digest), evaluation.metrics.keys()) == (
        8,
        12,
        evaluation.base.keys(),
    )
    assert len(evaluation.metrics) == 9
    assert evaluation.metrics["evaluation_loss"] != evaluation.base["evaluation_loss"]
    table = mlflow.client().load_table(
        mlflow.client().get_run(mlflow.run_id).info.experiment_id, "evaluation/generations.json"
    )
    assert (list(table.columns), len(table)) == (["prompt", "reference", "base", "model"], 3)
    assert all(table["prompt"].str.startswith("What is the "))
    assert list(table["base"]) != list(table["model"])
    # An attempt that comes after it logs the table in its place, and finds the same.
    assert result_of(evaluate(evaluated, adapter, **mlflow.env)) == evaluation
    again = mlflow.client().load_table(
        mlflow.client().get_run(mlflow.run_id).info.experiment_id, "evaluation/generations.json"
    )
    assert again.equals(table)


def test_by_default_the_loss_is_measured_and_some_answers_are_generated(
    evaluate: Evaluate,
    base_model: Path,
    splits: Path,
    tmp_path: Path,
    mlflow: Mlflow,
) -> None:
    evaluated = recipe(base_model, splits, {"baseModel": False, "maxNewTokens": 4, "generations": 2})
    evaluation = result_of(evaluate(evaluated, base_model, **mlflow.env))
    assert (sorted(evaluation.metrics), evaluation.base) == (["evaluation_loss", "evaluation_perplexity"], {})
    (path,) = tmp_path.glob("artifacts/**/generations.json")
    table = json.loads(path.read_text())
    assert (table["columns"], len(table["data"])) == (["prompt", "reference", "model"], 2)


def test_sinks_get_the_numbers_of_both_models(
    evaluate: Evaluate, base_model: Path, splits: Path, tmp_path: Path
) -> None:
    sinks = [{"type": "TensorBoard", "uri": str(tmp_path / "events")}]
    spec = {"metrics": ["Loss"], "generations": 0}
    evaluated = recipe(base_model, splits, spec, tracking={"sinks": sinks}, metricsStep=7)
    evaluation = result_of(evaluate(evaluated, base_model))
    assert read_events(tmp_path / "events" / "tests-tiny-01234567") == {
        # Numbers of 32 bits.
        name: [(7, float(np.float32(value)))]
        for name, value in {
            "evaluation_loss": evaluation.metrics["evaluation_loss"],
            "base_evaluation_loss": evaluation.base["evaluation_loss"],
        }.items()
    }


def test_texts_have_a_loss_and_no_table(
    evaluate: Evaluate, base_model: Path, splits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = recipe(base_model, splits, columns={"type": "Text", "text": "response"})
    evaluation = result_of(evaluate(evaluated, base_model))
    assert evaluation.metrics == evaluation.base
    output = capsys.readouterr().out
    assert "test: 8 read, 8 kept; evaluating 8 rows\n" in output
    assert f"the version {base_model}: evaluation_loss " in output


def test_columns_are_found_where_the_recipe_names_none(
    evaluate: Evaluate, base_model: Path, splits: Path
) -> None:
    spec = {"metrics": ["Loss"], "generations": 0, "baseModel": False}
    without_columns = recipe(base_model, splits, spec, columns=None)
    with_columns = recipe(base_model, splits, spec)
    assert result_of(evaluate(without_columns, base_model)) == result_of(evaluate(with_columns, base_model))


def test_a_table_that_cannot_be_logged_does_not_fail_the_evaluation(
    evaluate: Evaluate, base_model: Path, splits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {
        "MLFLOW_TRACKING_URI": "http://localhost:1",
        "MLFLOW_RUN_ID": "0" * 32,
        "FINETUNE_MLFLOW_PATIENCE_SECONDS": "2",
    }
    evaluated = recipe(base_model, splits, {"baseModel": False, "maxNewTokens": 2, "generations": 1})
    assert result_of(evaluate(evaluated, base_model, **away)).rows == 8
    assert "MLflow was not reachable for 2 s" in capsys.readouterr().out


REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "no evaluation": ({"evaluation": None}, 64, "RecipeRefused", "the recipe has no evaluation: set spec"),
    "texts without answers": (
        {"evaluation": {"metrics": ["Bleu"]}, "columns": {"type": "Text", "text": "response"}},
        64,
        "RecipeRefused",
        "evaluation.metrics Bleu compare answers",
    ),
    "no column": ({"columns": {"type": "Text"}}, 65, "MissingColumn", "has no column text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_evaluated_ends_with_a_sentence(
    evaluate: Evaluate, base_model: Path, splits: Path, case: str
) -> None:
    changes, code, reason, sentence = REFUSED[case]
    refused = recipe(base_model, splits, **changes)
    if "evaluation" in changes and changes["evaluation"] is None:
        refused = refused.model_copy(update={"evaluation": None})
    ended, message = evaluate(refused, base_model)
    assert message is not None
    assert message.error is not None
    assert (ended, message.error.reason) == (code, reason)
    assert sentence in message.error.message


def test_a_model_with_broken_weights_is_refused(
    evaluate: Evaluate, base_model: Path, splits: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    broken = AutoModelForCausalLM.from_pretrained(base_model)
    broken.get_input_embeddings().weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(base_model).save_pretrained(tmp_path / "broken")
    code, message = evaluate(recipe(base_model, splits), tmp_path / "broken")
    assert message is not None
    assert message.error is not None
    assert (code, message.error.reason) == (64, "WeightsNotFinite")


def test_fetch_leaves_a_standalone_model_and_no_message(
    evaluate: Evaluate, base_model: Path, splits: Path, tmp_path: Path
) -> None:
    place = {contract.ENV_MODEL_PATH: str(tmp_path / "model")}
    evaluated = recipe(base_model, splits, {"command": ["judge"]}, method={"type": "LoRA"})
    adapter = save_adapter(base_model, tmp_path / "adapter")
    assert evaluate(evaluated, adapter, "--fetch", **place) == (0, None)
    assert (tmp_path / "model" / "model.safetensors").is_file()
