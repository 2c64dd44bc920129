"""What the loop does when training goes wrong, or well, and what it costs."""

from __future__ import annotations

import errno
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds import contract
from finetune_trainer.train.checkpoint.folder import CheckpointFolder
from finetune_trainer.train.loop import Loop
from finetune_trainer.train.model.schedule import Schedule
from unit.trainer.test_end_to_end import error_of, eval_loss_of, history, validation_loss

if TYPE_CHECKING:
    from support.pods import Outcome, Pod
    from unit.trainer.conftest import Mlflow

EVALUATION = re.compile(r"evaluation at step (\d+): loss ([\d.]+)")


def breaking_at(monkeypatch: pytest.MonkeyPatch, step: int, rate: float) -> None:
    """Have the learning rate jump after so many steps."""
    before = Schedule.at
    monkeypatch.setattr(Schedule, "at", lambda self, at: before(self, at) if at < step else rate)


def evaluations(outcome: Outcome) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in EVALUATION.findall(outcome.output)}


def kept(pod: Pod) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(
        int(path.parent.name.removeprefix("step-")) for path in pod.folder.glob("checkpoints/*/*/COMPLETE")
    )


def test_the_weights_with_the_least_evaluation_loss_are_registered(
    pod: Pod, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `keep: 1` too: the best stays beside the newest."""
    from transformers import AutoModelForCausalLM

    breaking_at(monkeypatch, 6, 1.0)
    pod = pod.but(
        {
            "training.maxSteps": 12,
            "training.evalSteps": 2,
            "training.logSteps": 100,
            "training.loadBest": True,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 1, "keep": 1},
            "register": {"model": "best"},
        }
    )
    pod.env |= mlflow.env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    found = evaluations(outcome)
    best = min(found, key=lambda step: found[step])
    assert (best, list(found)) == (6, [2, 4, 6, 8, 10, 12])
    assert found[12] > found[6] + 0.1
    assert f"loaded the best weights, those of step 6: loss {found[6]:.4f}" in outcome.output
    assert kept(pod) == [6, 12]
    assert eval_loss_of(outcome) == pytest.approx(found[6], abs=1e-4)
    assert history(mlflow, contract.METRIC_FINAL_EVAL_LOSS) == {12: pytest.approx(found[6], abs=1e-4)}
    (version,) = mlflow.client().search_model_versions("name='best'")
    assert float(version.tags[contract.TAG_EVAL_LOSS]) == pytest.approx(found[6], abs=1e-4)
    (config,) = pod.folder.glob("artifacts/models/*/artifacts/model/config.json")
    registered = AutoModelForCausalLM.from_pretrained(config.parent)
    assert validation_loss(registered, pod) == pytest.approx(eval_loss_of(outcome), rel=1e-5)

    # The next attempt, after the end, finds the same weights again.
    again = pod.run_here(capsys)
    assert (again.code, again.losses) == (0, {})
    assert eval_loss_of(again) == pytest.approx(found[6], abs=1e-4)


def test_a_loss_that_runs_away_ends_the_attempt_and_the_last_good_checkpoint_stays(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking_at(monkeypatch, 5, 5.0)
    outcome = pod.but(
        {
            "training.maxSteps": 100,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 4, "keep": 1},
        }
    ).run_here(capsys)
    error = error_of(outcome)
    assert (outcome.code, error.reason) == (1, "DivergingLoss"), outcome.output
    best = min(outcome.losses.values())
    step, loss = max(outcome.losses.items())
    assert error.message == (
        f"the loss is {loss:.2f} at step {step}, after {best:.2f} at its best: lower training.learningRate, or warm "
        "up longer"
    )
    last = (step - 1) // 4 * 4
    assert kept(pod) == [last]
    assert outcome.losses[last] < best + 0.5


def test_the_run_says_while_checkpoints_cannot_be_written(
    pod: Pod, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = pod.but(
        {
            "training.maxSteps": 3,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 1},
        }
    )
    pod.env |= mlflow.env

    def full(_folder: CheckpointFolder, _step: int, _progress: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def told() -> str:
        tags = mlflow.client().get_run(mlflow.run_id).data.tags
        return str(tags[contract.TAG_CHECKPOINT_ERROR])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "publish", full)
        outcome = pod.run_here(capsys)
    assert (outcome.code, kept(pod)) == (0, [])
    assert "the checkpoint of step 3 could not be written" in told()
    assert "No space left on device" in told()
    outcome = pod.run_here(capsys)
    assert (outcome.code, kept(pod)) == (0, [2, 3])
    assert told() == ""


def test_a_step_never_waits_for_the_gpu(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in a step asks for a tensor's value, but where it is on the host: what the ranks tell each other."""
    asked: set[str] = set()
    stepping = threading.local()

    def noting(name: str) -> None:
        call = getattr(torch.Tensor, name)

        def asking(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if getattr(stepping, "now", False):
                asked.add(Path(sys._getframe(1).f_code.co_filename).name)
            return call(tensor, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, asking)

    for name in (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    ):
        noting(name)
    step: Any = Loop._train_step

    def watched(loop: Loop) -> bool:
        stepping.now = True
        try:
            return bool(step(loop))
        finally:
            stepping.now = False

    monkeypatch.setattr(Loop, "_train_step", watched)
    outcome = pod.but({"training.maxSteps": 3, "training.gradientAccumulation": 2}).run_here(capsys)
    assert outcome.code == 0, outcome
    # Attention has a way of its own on the CPU.
    assert asked == {"distributed.py", "attention.py"}


def test_compiled_kernels_are_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 14: what finds the package `kernels` downloads code from the Hub while training runs."""
    import importlib

    from finetune_trainer.train import worker

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    importlib.import_module("kernels")
    worker.quiet_libraries()
    with pytest.raises(ImportError):
        importlib.import_module("kernels")
    assert importlib.util.find_spec("kernels") is None
