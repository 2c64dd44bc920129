"""Recipes and data that end the pods before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_crds.contract import PodError
from finetune_trainer.train import build
from support.ports import free_port
from support.training import error_of

if TYPE_CHECKING:
    from support.pods import Pod


def test_a_decay_that_is_longer_than_the_run_ends_the_pod_before_the_model_is_loaded(
    pod: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_network", lambda *_args, **_more: pytest.fail("the model is loaded"))
    changes = {"maxSteps": None, "epochs": 1, "scheduler": "WSD", "decaySteps": 1000}
    outcome = pod.but({f"training.{name}": value for name, value in changes.items()}).run_here(capsys)
    assert (outcome.code, error_of(outcome).reason) == (64, "RecipeRefused")
    assert error_of(outcome).message.startswith("training.decaySteps is 1000, but the run has ")


def test_a_base_that_is_not_there_ends_the_pod_with_64(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = pod.but({"model.base": "/models/nope"}).run_here(capsys)
    assert (outcome.code, error_of(outcome)) == (
        64,
        PodError(
            reason="ModelNotFound",
            message="model.base /models/nope does not exist in the pod: mount the volume in spec.pods or "
            "correct the path",
            rank=0,
        ),
    )


def test_all_pods_of_a_gang_end_with_the_same_sentence(pod: Pod, tmp_path: Path, table: Path) -> None:
    port = free_port()
    wrong = pod.but({"data.columns": {"type": "PromptResponse", "prompt": "question"}})
    gang = [wrong.in_gang(rank, port) for rank in range(2)]
    for rank, member in enumerate(gang):
        member.folder = tmp_path / str(rank)
        member.folder.mkdir()
        member.forked = True
    started = [member.start() for member in gang]
    for member, process in zip(gang, started, strict=True):
        outcome = member.wait(process)
        assert (outcome.code, error_of(outcome)) == (
            65,
            PodError(
                reason="MissingColumn",
                message=f"the Delta table {table} has no column question: it has id, prompt, response, split "
                "and tokens",
                rank=0,
            ),
        ), outcome.output
        assert outcome.output.count("has no column question") == 1
        assert "Traceback" not in outcome.output


def test_a_recipe_that_contradicts_itself_is_refused_before_any_rank_starts(pod: Pod) -> None:
    outcome = pod.but({"method": {"type": "LoRA", "softPrompt": {}}}).run()
    assert (outcome.code, error_of(outcome)) == (
        64,
        PodError(
            reason="RecipeRefused",
            message="method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning",
        ),
    )
    assert "evaluation" not in outcome.output
