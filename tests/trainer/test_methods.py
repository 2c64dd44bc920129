"""Methods with objectives: trained, exported, registered, loaded again as anyone would, and asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from finetune_crds.objective import ObjectiveType
from finetune_crds.training import MethodType
from finetune_trainer.train.objectives import answers
from support.cells import TABLE, WARNINGS, Cell, Models, check, exported, let_through, loss_of, pod_of
from support.training import eval_loss_of, new_run

if TYPE_CHECKING:
    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
# Each method is trained, each kind of method (full, low rank, four bits, virtual tokens) with each number of ranks that
# makes a difference to it, each objective with full weights or adapters, merged and not, and new tokens with both.
# `make test-long` trains the whole table, each cell on one rank and on two.
CHOSEN = (
    "Full-DPO",
    "Full-KTO",
    "Full-RewardModel",
    "LoRA-SimPO",
    "LoRA-Distillation",
    "DoRA-ORPO",
    "QLoRA-SFT",
    "PrefixTuning-SFT",
    "PromptTuning-SFT",
)


@pytest.mark.parametrize("cell", [cell for cell in TABLE if str(cell) in CHOSEN], ids=str)
def test_what_is_trained_is_what_is_loaded_again(
    *,
    cell: Cell,
    pod: Pod,
    models: Models,
    mlflow_of_test: Mlflow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(cell, pod, models, mlflow_of_test, capsys)


def test_a_second_attempt_does_not_compute_the_reference_again(
    pod: Pod,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pod = pod_of(Cell("Full", "DPO"), pod, models).but(
        {"training.maxSteps": 2, "checkpoint": {"uri": str(pod.folder / "checkpoints")}}
    )
    first = pod.run_here(capsys)
    assert first.code == 0, first

    def again(*_args: Any) -> None:
        raise AssertionError("the reference is computed again")

    monkeypatch.setattr(answers, "compute_reference", again)
    second = pod.run_here(capsys)
    assert (second.code, second.losses, eval_loss_of(second)) == (0, {}, eval_loss_of(first)), second


def test_each_method_and_each_objective_is_chosen() -> None:
    chosen = [cell for cell in TABLE if str(cell) in CHOSEN]
    assert len(chosen) == len(CHOSEN)
    assert {cell.method for cell in chosen} == set(get_args(MethodType))
    assert {cell.objective for cell in chosen} == set(get_args(ObjectiveType))
    assert {(cell.ranks, cell.merge) for cell in chosen} == {(1, False), (1, True), (2, False), (2, True)}
    grown = {cell.method == "Full" for cell in chosen if "model.newTokens" in cell.changes}
    assert grown == {True, False}


def test_a_registered_model_teaches(
    *,
    pod: Pod,
    models: Models,
    mlflow_of_test: Mlflow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The teacher is a version in MLflow."""
    from transformers import AutoModelForCausalLM

    tracked = mlflow_of_test
    teaching = pod.but({"training.maxSteps": 20, "register": {"model": "teacher", "aliases": []}})
    teaching.env |= tracked.env
    assert teaching.run_here(capsys).code == 0
    teacher = AutoModelForCausalLM.from_pretrained(exported(teaching, "model"))

    cell = Cell("LoRA", "Distillation")
    spec = {"objective.distillation.teacher": "models:/teacher/1"}
    pod = pod_of(cell, pod, models).but({"register": None, **spec})
    pod.folder = pod.folder / "student"
    pod.folder.mkdir()
    pod.env |= new_run(tracked.uri, pod.folder).env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    base = AutoModelForCausalLM.from_pretrained(models.base)
    assert outcome.message is not None
    assert outcome.message.train is not None
    before = outcome.message.train.base_eval_loss
    assert before is not None
    assert before == pytest.approx(loss_of(base, cell, pod, base, teacher), rel=1e-4)
    assert eval_loss_of(outcome) < before - 0.02


def test_the_table_is_the_whole_of_what_the_schema_lets_through() -> None:
    assert let_through() == {(cell.method, cell.objective) for cell in TABLE}
