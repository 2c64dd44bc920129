"""What the attempt after one that ran out of memory changes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import ReducedMemory
from finetune_crds.status_parts import DeviceStatus
from fixtures.operator_in_memory.decisions import (
    child,
    conclude,
    ended,
    failure_of,
    ftj,
    observed,
    running,
    said,
)

Json = dict[str, Any]
JOB = "tune-train-1"
GPU_ERROR = TerminationMessage(error=PodError(reason="OutOfMemory", message="rank 1 ran out of GPU memory"))
CPU, GPU = DeviceStatus(type="CPU"), DeviceStatus(type="GPU", count=2)
CHECKPOINT: Json = {"uri": "/data/checkpoints", "everySteps": 10}


def fail(
    *,
    host: bool = False,
    reduced: ReducedMemory | None = None,
    device: DeviceStatus = GPU,
    **parts: Any,
) -> Any:
    """The decision after the first attempt has run out of memory of a GPU, or of the host."""
    before = running(reduced_memory=reduced, device=device)
    pod = ended(JOB, 0, 137, reason="OOMKilled") if host else ended(JOB, 0, 1, GPU_ERROR)
    return conclude(ftj(before, **parts), observed(child(JOB, "Failed"), pods=[pod]))


SMALLER = ReducedMemory(per_device_batch_size=2, gradient_accumulation=2)
SMALLEST = ReducedMemory(per_device_batch_size=1, gradient_accumulation=4)
FULL = SMALLEST.model_copy(update={"activation_checkpointing": "Full"})
SYNC = ReducedMemory(checkpoint_mode="Sync")
KTO: Json = {
    "objective": {"type": "KTO"},
    "data": {
        "splits": {"type": "Delta", "path": "/data/splits"},
        "columns": {"type": "Unpaired", "prompt": "p", "response": "r", "label": "l"},
    },
}
# What failed; then the settings of the next attempt, and how the message names them.
REDUCTIONS: dict[str, tuple[Any, ReducedMemory, str]] = {
    "smaller passes": (fail(), SMALLER, "perDeviceBatchSize 2 and gradientAccumulation 2"),
    "even smaller ones": (
        fail(reduced=SMALLER),
        SMALLEST,
        "perDeviceBatchSize 1 and gradientAccumulation 4",
    ),
    "then recomputation": (
        fail(reduced=SMALLEST),
        FULL,
        "perDeviceBatchSize 1, gradientAccumulation 4 and activationCheckpointing Full",
    ),
    "an odd number of sequences": (
        fail(training={"perDeviceBatchSize": 9, "gradientAccumulation": 2}),
        ReducedMemory(per_device_batch_size=3, gradient_accumulation=6),
        "perDeviceBatchSize 3 and gradientAccumulation 6",
    ),
    "larger passes of the evaluation": (
        fail(training={"perDeviceBatchSize": 4, "perDeviceEvalBatchSize": 16}),
        ReducedMemory(per_device_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation=2),
        "perDeviceBatchSize 2, perDeviceEvalBatchSize 2 and gradientAccumulation 2",
    ),
    "KTO keeps its passes": (
        fail(**KTO),
        ReducedMemory(activation_checkpointing="Full"),
        "activationCheckpointing Full",
    ),
    "the host of a CPU": (
        fail(host=True, device=CPU),
        SMALLER,
        "perDeviceBatchSize 2 and gradientAccumulation 2",
    ),
    "the host of a GPU": (fail(host=True, checkpoint=CHECKPOINT), SYNC, "checkpointMode Sync"),
}


@pytest.mark.parametrize(("decision", "reduced", "settings"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_the_next_attempt_uses_less(decision: Any, reduced: ReducedMemory, settings: str) -> None:
    after = decision.status
    assert (after.reduced_memory, after.attempt, after.restarts) == (reduced, 2, 0)
    condition = said(decision, ConditionType.TRAINED)
    assert condition is not None
    assert condition[1] == ConditionReason.RESTARTING
    assert condition[2].startswith(f"attempt 1 ran out of memory, and the next one has {settings}; pod ")


def test_its_recipe_has_the_settings_and_the_same_sequences_in_a_step() -> None:
    training = {"perDeviceBatchSize": 4, "gradientAccumulation": 1, "activationCheckpointing": "None"}
    before = running(attempt=2, reduced_memory=FULL.model_copy(update={"checkpoint_mode": "Sync"}))
    decision = conclude(ftj(before, training=training, checkpoint=CHECKPOINT))
    (config_map,) = (body for body in decision.apply if body["kind"] == "ConfigMap")
    recipe = yaml.safe_load(config_map["data"]["recipe.yaml"])
    names = ("perDeviceBatchSize", "gradientAccumulation", "activationCheckpointing")
    assert [recipe["training"][name] for name in names] == [1, 4, "Full"]
    assert recipe["checkpoint"]["mode"] == "Sync"


# What failed, and the reason of Failed.
ENDS: dict[str, tuple[Any, ConditionReason]] = {
    "nothing is left": (fail(reduced=FULL), ConditionReason.OUT_OF_MEMORY),
    "no restart is allowed": (fail(runPolicy={"maxRestarts": 0}), ConditionReason.MAX_RESTARTS_REACHED),
}


@pytest.mark.parametrize(("decision", "reason"), ENDS.values(), ids=ENDS)
def test_the_job_fails(decision: Any, reason: ConditionReason) -> None:
    failed = failure_of(decision)
    assert failed is not None
    assert failed[1] == reason


# What failed, and is tried again as it is.
RETRIES: dict[str, Any] = {
    "a host with nothing to reduce": fail(host=True),
    "synchronous checkpoints": fail(host=True, checkpoint={**CHECKPOINT, "mode": "Sync"}),
    "a command": fail(host=True, device=CPU, trainer={"command": ["torchrun", "train.py"]}),
}


@pytest.mark.parametrize("decision", RETRIES.values(), ids=RETRIES)
def test_the_next_attempt_is_the_same(decision: Any) -> None:
    after = decision.status
    assert (after.reduced_memory, after.attempt, after.restarts) == (None, 2, 1)
