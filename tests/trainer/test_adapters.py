"""Adapters through `finetune-train`: their base, and an adapter as the base of the next job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from support.training import eval_loss_of, new_run, validation_loss

if TYPE_CHECKING:
    from support.pods import Outcome, Pod
    from support.training import Mlflow


def test_an_adapter_trains_and_its_version_finds_the_base(
    pod: Pod, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM

    pod = pod.but(
        {
            "method": {"type": "LoRA", "lora": {"rank": 8, "targetModules": ["q_proj", "v_proj", "up_proj"]}},
            "training.maxSteps": 20,
            "training.packing": False,
            "training.gradientAccumulation": 2,
            "training.activationCheckpointing": "Full",
            "register": {"model": "adapter"},
        }
    )
    pod.env |= mlflow.env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    assert outcome.losses[20] < outcome.losses[1] - 0.1
    run = mlflow.client().get_run(mlflow.run_id)
    assert (run.data.params["lora_rank"], run.data.params["target_modules"]) == ("8", "q_proj,v_proj,up_proj")
    (weights,) = pod.folder.glob("artifacts/models/*/artifacts/peft")
    adapted = AutoPeftModelForCausalLM.from_pretrained(weights)
    assert validation_loss(adapted, pod) == pytest.approx(eval_loss_of(outcome), rel=1e-4)


def adapter_of(base: str, pod: Pod, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]) -> float:
    """Register an unmerged adapter as candidate of the model `first`, and return its loss."""
    changes = {"model.base": base, "method": {"type": "LoRA"}, "training.learningRate": 0.02}
    pod = pod.but({**changes, "register": {"model": "first"}})
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    mlflow.client().set_registered_model_alias("first", "candidate", "1")
    return eval_loss_of(outcome)


def base_eval_loss_of(outcome: Outcome) -> float:
    assert outcome.message is not None, outcome.output
    assert outcome.message.train is not None, outcome.output
    assert outcome.message.train.base_eval_loss is not None
    return outcome.message.train.base_eval_loss


def test_an_unmerged_adapter_on_an_object_store_is_the_base_of_the_next_job(
    pod: Pod,
    mlflow: Mlflow,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(base_model), "/bucket/base", recursive=True)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri: (store, uri.removeprefix("s3:/")))
    pod.env |= mlflow.env
    learned = adapter_of("s3://bucket/base", pod, mlflow, capsys)
    second = pod.but(
        {
            "model.base": "models:/first@candidate",
            "method": {"type": "LoRA", "export": "Merged"},
            "training.maxSteps": 1,
            "register": {"model": "second"},
        }
    )
    second.env |= new_run(mlflow.uri, pod.folder / "second").env
    outcome = second.run_here(capsys)
    assert outcome.code == 0, outcome
    assert base_eval_loss_of(outcome) == pytest.approx(learned, rel=1e-5)
    assert "model.base models:/first@candidate is an adapter: merged into its base s3://bucket/base\n" in (
        outcome.output
    )
    store.rm("/bucket", recursive=True)


def test_an_unmerged_adapter_on_a_volume_is_base_and_teacher_of_two_ranks(
    pod: Pod, mlflow: Mlflow, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    pod.env |= mlflow.env
    learned = adapter_of(str(base_model), pod, mlflow, capsys)
    candidate = "models:/first@candidate"
    second = pod.but(
        {
            "model.base": candidate,
            "objective": {
                "type": "Distillation",
                "distillation": {"teacher": candidate, "weight": 0.5, "temperature": 1.0},
            },
            "method": {"type": "LoRA"},
            "distributed.processesPerNode": 2,
            "training.perDeviceBatchSize": 2,
            "training.maxSteps": 1,
            "register": {"model": "second"},
        }
    )
    second.env |= new_run(mlflow.uri, pod.folder / "second").env
    second.forked = True
    outcome = second.run()
    assert outcome.code == 0, outcome.output
    # Half of the loss is the divergence from the teacher, and the student begins as its teacher.
    assert base_eval_loss_of(outcome) == pytest.approx(0.5 * learned, rel=1e-5)
    # A base that was merged here is found nowhere else, so the version has a copy of it.
    (copied,) = pod.folder.glob("second/artifacts/models/*/artifacts/model")
    assert validation_loss(AutoModelForCausalLM.from_pretrained(copied), pod) == pytest.approx(
        learned, rel=1e-5
    )
