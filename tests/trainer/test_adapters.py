"""Adapters through `finetune-train`: their base, and an adapter as the base of the next job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin
from support.cells import PROMPT, WARNINGS, Models
from support.training import error_of, eval_loss_of, new_run, validation_loss

if TYPE_CHECKING:
    from support.pods import Outcome, Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]


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


def version_of(pod: Pod) -> Path:
    """The files of what a pod has registered."""
    (mlmodel,) = pod.folder.glob("artifacts/models/*/artifacts/MLmodel")
    return mlmodel.parent


def on_two_ranks(pod: Pod, mlflow: Mlflow, changes: dict[str, Any]) -> Outcome:
    """The second job, in a run of its own."""
    halved = {"distributed.processesPerNode": 2, "training.perDeviceBatchSize": 2}
    second = pod.but({**changes, **halved, "register": {"model": "second"}})
    second.env |= new_run(mlflow.uri, pod.folder / "second").env
    second.forked = True
    outcome = second.run()
    assert outcome.code == 0, outcome.output
    return outcome


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
    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri, **_: (store, uri.removeprefix("s3:/")))
    pod.env |= mlflow.env
    learned = adapter_of("s3://bucket/base", pod, mlflow, capsys)
    # The version names its base, and does not hold it.
    version, base = (
        version_of(pod),
        Origin("s3://bucket/base", digest=base_reference.compute_digest(base_model)),
    )
    assert not (version / "model").exists()
    assert base_reference.read_reference(version / "peft") == base
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
    # Weights in which one byte is another one are not the base.
    weights = store.cat("/bucket/base/model.safetensors")
    store.pipe("/bucket/base/model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))
    refused = second.run_here(capsys)
    assert (refused.code, error_of(refused).reason) == (64, "BaseChanged")
    store.rm("/bucket", recursive=True)
    refused = second.run_here(capsys)
    assert (refused.code, error_of(refused).message) == (
        64,
        "model.base models:/first@candidate is an adapter of s3://bucket/base, which no longer exists: restore the "
        "base, or start from another model",
    )


def test_an_unmerged_adapter_on_a_volume_is_base_and_teacher_of_two_ranks(
    pod: Pod, mlflow: Mlflow, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    pod.env |= mlflow.env
    learned = adapter_of(str(base_model), pod, mlflow, capsys)
    candidate = "models:/first@candidate"
    second = {
        "model.base": candidate,
        "objective": {
            "type": "Distillation",
            "distillation": {"teacher": candidate, "weight": 0.5, "temperature": 1.0},
        },
        "method": {"type": "LoRA"},
        "training.maxSteps": 1,
    }
    outcome = on_two_ranks(pod, mlflow, second)
    # Half of the loss is the divergence from the teacher, and the student begins as its teacher.
    assert base_eval_loss_of(outcome) == pytest.approx(0.5 * learned, rel=1e-5)
    # A base that was merged here is found nowhere else, so the version has a copy of it.
    (copied,) = pod.folder.glob("second/artifacts/models/*/artifacts/model")
    assert validation_loss(AutoModelForCausalLM.from_pretrained(copied), pod) == pytest.approx(
        learned, rel=1e-5
    )


def test_a_full_fine_tuning_begins_as_an_unmerged_adapter_ended(
    pod: Pod, mlflow: Mlflow, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    pod.env |= mlflow.env
    learned = adapter_of(str(base_model), pod, mlflow, capsys)
    second = pod.but(
        {"model.base": "models:/first@candidate", "training.maxSteps": 1, "register": {"model": "second"}}
    )
    second.env |= new_run(mlflow.uri, pod.folder / "second").env
    outcome = second.run_here(capsys)
    assert outcome.code == 0, outcome
    assert f"is an adapter: merged into its base {base_model}\n" in outcome.output
    assert base_eval_loss_of(outcome) == pytest.approx(learned, rel=1e-5)
    assert eval_loss_of(outcome) != pytest.approx(learned, rel=1e-4)
    # The version is a whole model.
    (artifacts,) = pod.folder.glob("second/artifacts/models/*/artifacts")
    assert not (artifacts / "peft").exists()
    trained = AutoModelForCausalLM.from_pretrained(artifacts / "model")
    assert validation_loss(trained, pod) == pytest.approx(eval_loss_of(outcome), rel=1e-4)


def test_an_adapter_is_trained_further_on_two_ranks(
    pod: Pod, mlflow: Mlflow, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM

    pod.env |= mlflow.env
    learned = adapter_of(str(base_model), pod, mlflow, capsys)
    second = {
        "model": {"base": "models:/first@candidate", "adapter": "Continue"},
        "method": {"type": "LoRA"},
        "training.maxSteps": 2,
    }
    outcome = on_two_ranks(pod, mlflow, second)
    assert (
        f"models:/first@candidate is an adapter of {base_model}: training continues from it\n"
        in outcome.output
    )
    assert base_eval_loss_of(outcome) == pytest.approx(learned, rel=1e-5)
    assert eval_loss_of(outcome) != pytest.approx(learned, rel=1e-4)
    # The version is one adapter of the same base, which it names and does not hold.
    (artifacts,) = pod.folder.glob("second/artifacts/models/*/artifacts")
    assert not (artifacts / "model").exists()
    adapted = AutoPeftModelForCausalLM.from_pretrained(artifacts / "peft")
    assert adapted.peft_config["default"].base_model_name_or_path == str(base_model)
    assert validation_loss(adapted, pod) == pytest.approx(eval_loss_of(outcome), rel=1e-4)


def test_from_a_registered_model_by_two_objectives_to_a_model_that_answers(
    pod: Pod,
    models: Models,
    mlflow_of_test: Mlflow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SFT trains an adapter of a registered model, DPO trains it further, and what is registered last is one model."""
    from mlflow.transformers import load_model
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tracked = mlflow_of_test
    client = tracked.client()
    client.create_registered_model("plain")
    client.create_model_version("plain", source=models.base.as_uri())
    client.set_registered_model_alias("plain", "champion", "1")
    pod.env |= tracked.env
    learned = adapter_of("models:/plain@champion", pod, tracked, capsys)
    version, base = (
        version_of(pod),
        Origin("models:/plain/1", digest=base_reference.compute_digest(models.base)),
    )
    assert not (version / "model").exists()
    assert base_reference.read_reference(version / "peft") == base

    preferred = pod.but(
        {
            "model": {"base": "models:/first@candidate", "adapter": "Continue"},
            "method": {"type": "LoRA", "export": "Merged"},
            "objective": {"type": "DPO", "dpo": {"beta": 0.5}},
            # Its columns are found in the schema.
            "data": {"splits": {"type": "Delta", "path": str(models.preferences)}},
            "training.learningRate": 0.005,
            "training.maxSteps": 4,
            "register": {"model": "preferred"},
        }
    )
    preferred.folder = pod.folder / "preferred"
    preferred.folder.mkdir()
    preferred.env |= new_run(tracked.uri, preferred.folder).env
    outcome = preferred.run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert (
        "models:/first@candidate is an adapter of models:/plain/1: training continues from it\n"
        in outcome.output
    )
    client.set_registered_model_alias("preferred", "candidate", "1")

    pipe = load_model("models:/preferred@candidate", torch_dtype="float32")
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(models.base), str(version_of(preferred) / "peft")
    ).merge_and_unload()
    torch.testing.assert_close(dict(pipe.model.state_dict()), dict(merged.state_dict()))
    assert validation_loss(pipe.model, pod) != pytest.approx(learned, rel=1e-3)
    question = pipe.tokenizer(PROMPT, return_tensors="pt")
    (answer,) = pipe(PROMPT, max_new_tokens=12, do_sample=False, return_full_text=False)
    by_hand, untrained = (
        pipe.tokenizer.decode(
            model.generate(**question, max_new_tokens=12, do_sample=False)[0, question.input_ids.shape[1] :],
            skip_special_tokens=True,
        )
        for model in (merged, AutoModelForCausalLM.from_pretrained(models.base))
    )
    assert answer["generated_text"] == by_hand
    assert by_hand != untrained
