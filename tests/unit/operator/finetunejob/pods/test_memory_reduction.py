"""What the attempt after one that ran out of memory changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import ReducedMemory
from finetune_crds.status_parts import DeviceStatus, PlanStatus, Recomputation
from finetune_operator.finetunejob.pods.memory_reduction import apply_to_training
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
TOO_LARGE = TerminationMessage(error=PodError(reason="OutOfMemory", message="the job needs about 90 GiB"))
UNSUPPORTED = TerminationMessage(error=PodError(reason="RecomputationUnsupported", message="set it to None"))
END = f"pod {JOB}-0-abcde ended with exit code"
CPU, GPU = DeviceStatus(type="CPU"), DeviceStatus(type="GPU", count=2)
CHECKPOINT: Json = {"uri": "/data/checkpoints", "everySteps": 10}


def fail(
    *,
    host: bool = False,
    refusal: TerminationMessage | None = None,
    reduced: ReducedMemory | None = None,
    device: DeviceStatus = GPU,
    plan: PlanStatus | None = None,
    **parts: Any,
) -> Any:
    """The decision after the first attempt has run out of memory of a GPU, or of the host, or has refused its settings."""
    before = running(reduced_memory=reduced, device=device, plan=plan)
    parts = {"method": {"type": "LoRA"}} | parts
    pod = ended(JOB, 0, 137, reason="OOMKilled") if host else ended(JOB, 0, 1, GPU_ERROR)
    if refusal:
        pod = ended(JOB, 0, 64, refusal)
    return conclude(ftj(before, **parts), observed(child(JOB, "Failed"), pods=[pod]))


SMALLER = ReducedMemory(per_device_batch_size=2, gradient_accumulation=2)
SMALLEST = ReducedMemory(per_device_batch_size=1, gradient_accumulation=4)
FULL = SMALLEST.model_copy(update={"activation_checkpointing": "Full"})
SYNC = ReducedMemory(checkpoint_mode="Sync")


def planned(kind: Recomputation) -> PlanStatus:
    """The plan of the failed attempt, as the trainer estimated it."""
    return PlanStatus(activation_checkpointing=kind, memory="70Gi", parameters=8, trained_parameters=8)


AUTO: Json = {"training": {"activationCheckpointing": "Auto"}}
ON_GPU, ON_HOST = "ran out of GPU memory", "used more memory than the limit of its container"
ALL_WEIGHTS: Json = {"method": {"type": "Full"}}
KTO: Json = {
    "objective": {"type": "KTO"},
    "data": {
        "splits": {"type": "Delta", "path": "/data/splits"},
        "columns": {"type": "Unpaired", "prompt": "p", "response": "r", "label": "l"},
    },
}
# What failed; then what it lacked, the settings of the next attempt, and how the message names them.
REDUCTIONS: dict[str, tuple[Any, str, ReducedMemory, str]] = {
    "smaller passes": (fail(), ON_GPU, SMALLER, "perDeviceBatchSize 2 and gradientAccumulation 2"),
    "even smaller ones": (
        fail(reduced=SMALLER),
        ON_GPU,
        SMALLEST,
        "perDeviceBatchSize 1 and gradientAccumulation 4",
    ),
    "then recomputation": (
        fail(reduced=SMALLEST),
        ON_GPU,
        FULL,
        "perDeviceBatchSize 1, gradientAccumulation 4 and activationCheckpointing Full",
    ),
    "an odd number of sequences": (
        fail(training={"perDeviceBatchSize": 9, "gradientAccumulation": 2}),
        ON_GPU,
        ReducedMemory(per_device_batch_size=3, gradient_accumulation=6),
        "perDeviceBatchSize 3 and gradientAccumulation 6",
    ),
    "larger passes of the evaluation": (
        fail(training={"perDeviceBatchSize": 4, "perDeviceEvalBatchSize": 16}),
        ON_GPU,
        ReducedMemory(per_device_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation=2),
        "perDeviceBatchSize 2, perDeviceEvalBatchSize 2 and gradientAccumulation 2",
    ),
    "passes of the evaluation alone": (
        fail(
            training={
                "perDeviceBatchSize": 1,
                "perDeviceEvalBatchSize": 16,
                "activationCheckpointing": "Full",
            }
        ),
        ON_GPU,
        ReducedMemory(per_device_eval_batch_size=1),
        "perDeviceEvalBatchSize 1",
    ),
    "Auto recomputes as much as before": (
        fail(**AUTO, plan=planned("Selective")),
        ON_GPU,
        SMALLER.model_copy(update={"activation_checkpointing": "Selective"}),
        "perDeviceBatchSize 2, gradientAccumulation 2 and activationCheckpointing Selective",
    ),
    "Auto recomputed nothing": (
        fail(**AUTO, plan=planned("None")),
        ON_GPU,
        SMALLER,
        "perDeviceBatchSize 2 and gradientAccumulation 2",
    ),
    "the plan of Auto is unknown": (
        fail(**AUTO),
        ON_GPU,
        SMALLER,
        "perDeviceBatchSize 2 and gradientAccumulation 2",
    ),
    "accumulated gradients need more than smaller passes save": (
        fail(refusal=TOO_LARGE, reduced=SMALLER),
        "does not fit into memory, by the estimate of the trainer",
        SMALLEST,
        "perDeviceBatchSize 1 and gradientAccumulation 4",
    ),
    "all weights are trained: accumulated gradients would need memory": (
        fail(**ALL_WEIGHTS),
        ON_GPU,
        ReducedMemory(activation_checkpointing="Full"),
        "activationCheckpointing Full",
    ),
    "and then smaller passes": (
        fail(**ALL_WEIGHTS, reduced=ReducedMemory(activation_checkpointing="Full")),
        ON_GPU,
        SMALLER.model_copy(update={"activation_checkpointing": "Full"}),
        "perDeviceBatchSize 2, gradientAccumulation 2 and activationCheckpointing Full",
    ),
    "all weights are trained: gradients accumulate already": (
        fail(**ALL_WEIGHTS, training={"perDeviceBatchSize": 4, "gradientAccumulation": 2}),
        ON_GPU,
        ReducedMemory(per_device_batch_size=2, gradient_accumulation=4),
        "perDeviceBatchSize 2 and gradientAccumulation 4",
    ),
    "smaller passes of a model that cannot be recomputed": (
        fail(**ALL_WEIGHTS, refusal=UNSUPPORTED, reduced=ReducedMemory(activation_checkpointing="Full")),
        "cannot recompute the activations of this model",
        SMALLER.model_copy(update={"activation_checkpointing": "None"}),
        "perDeviceBatchSize 2, gradientAccumulation 2 and activationCheckpointing None",
    ),
    "KTO keeps its passes": (
        fail(**KTO),
        ON_GPU,
        ReducedMemory(activation_checkpointing="Full"),
        "activationCheckpointing Full",
    ),
    "the host of a CPU": (
        fail(host=True, device=CPU),
        ON_HOST,
        SMALLER,
        "perDeviceBatchSize 2 and gradientAccumulation 2",
    ),
    "the host of a GPU": (fail(host=True, checkpoint=CHECKPOINT), ON_HOST, SYNC, "checkpointMode Sync"),
}


@pytest.mark.parametrize(("decision", "lack", "reduced", "settings"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_the_next_attempt_uses_less(decision: Any, lack: str, reduced: ReducedMemory, settings: str) -> None:
    after = decision.status
    (end,) = after.attempts
    assert (after.reduced_memory, after.attempt, after.restarts) == (reduced, 2, 0)
    assert end.cause == "OutOfMemory"
    condition = said(decision, ConditionType.TRAINED)
    assert condition is not None
    assert condition[1] == ConditionReason.RESTARTING
    why, _, _ = condition[2].partition("; attempt 2 ")
    assert why == f"attempt 1 {lack}, and the next one has {settings}; {END} {end.exit_code}"


def test_its_recipe_has_the_settings_and_the_same_sequences_in_a_step() -> None:
    training = {"perDeviceBatchSize": 4, "gradientAccumulation": 1, "activationCheckpointing": "None"}
    before = running(attempt=2, reduced_memory=FULL.model_copy(update={"checkpoint_mode": "Sync"}))
    decision = conclude(ftj(before, training=training, checkpoint=CHECKPOINT))
    (config_map,) = (body for body in decision.apply if body["kind"] == "ConfigMap")
    recipe = yaml.safe_load(config_map["data"]["recipe.yaml"])
    names = ("perDeviceBatchSize", "gradientAccumulation", "activationCheckpointing")
    assert [recipe["training"][name] for name in names] == [1, 4, "Full"]
    assert recipe["checkpoint"]["mode"] == "Sync"


REMEDY = "create a FineTuneJob with another name and a lower training.maxLength"
# What failed; then the reason and the message of Failed.
ENDS: dict[str, tuple[Any, ConditionReason, str]] = {
    "nothing is left": (
        fail(reduced=FULL, **ALL_WEIGHTS),
        ConditionReason.OUT_OF_MEMORY,
        f"attempt 1 ran out of GPU memory, and no setting is left that uses less; {END} 1; {REMEDY}, more GPUs with strategy FSDP or "
        "method LoRA",
    ),
    "nothing is left of an adapter's": (
        fail(reduced=FULL),
        ConditionReason.OUT_OF_MEMORY,
        f"attempt 1 ran out of GPU memory, and no setting is left that uses less; {END} 1; {REMEDY}, more GPUs with strategy FSDP or "
        "method QLoRA",
    ),
    "the least does not fit by the estimate": (
        fail(refusal=TOO_LARGE, reduced=FULL, device=CPU, method={"type": "QLoRA"}),
        ConditionReason.OUT_OF_MEMORY,
        f"attempt 1 does not fit into memory, by the estimate of the trainer, and no setting is left that uses less; {END} 64; {REMEDY} "
        "or a higher memory limit of the training pods",
    ),
    "the model cannot be recomputed": (
        fail(refusal=UNSUPPORTED, reduced=FULL, method={"type": "QLoRA"}),
        ConditionReason.OUT_OF_MEMORY,
        f"attempt 1 cannot recompute the activations of this model, and no setting is left that uses less; {END} 64; {REMEDY} or "
        "more GPUs with strategy FSDP",
    ),
    "the spec does not fit by the estimate": (
        fail(refusal=TOO_LARGE),
        ConditionReason.RECIPE_WRONG,
        f"{END} 64: the job needs about 90 GiB",
    ),
    "no restart is allowed": (
        fail(runPolicy={"maxRestarts": 0}),
        ConditionReason.MAX_RESTARTS_REACHED,
        f"attempt 1 failed and runPolicy.maxRestarts = 0 is reached; {END} 1: rank 1 ran out of GPU memory; correct the cause, and "
        "create a FineTuneJob with another name",
    ),
}


@pytest.mark.parametrize(("decision", "reason", "message"), ENDS.values(), ids=ENDS)
def test_the_job_fails(decision: Any, reason: ConditionReason, message: str) -> None:
    failed = failure_of(decision)
    assert failed is not None
    assert failed[1:3] == (reason, message)


@dataclass(frozen=True)
class Run:
    """A job whose attempts run out of GPU memory, however little they use."""

    method: str
    batch_size: int
    can_recompute: bool = True

    def list_settings(self) -> list[tuple[int, int, str]]:
        """The passes, their number and the recomputation of each attempt but the first one."""
        training = {"perDeviceBatchSize": self.batch_size}
        status = running(device=GPU)
        settings: list[tuple[int, int, str]] = []
        while status.attempt is not None and len(settings) < 9:
            job_name, reduced = f"tune-train-{status.attempt}", status.reduced_memory
            pod = ended(job_name, 0, 1, GPU_ERROR)
            if not self.can_recompute and reduced and reduced.activation_checkpointing == "Full":
                pod = ended(job_name, 0, 64, UNSUPPORTED)
            job = ftj(status, method={"type": self.method}, training=training)
            decision = conclude(job, observed(child(job_name, "Failed"), pods=[pod]))
            if failure_of(decision):
                break
            status = decision.status
            assert job.spec is not None
            used = apply_to_training(job.spec.training, status.reduced_memory)
            settings.append(
                (used.per_device_batch_size, used.gradient_accumulation, used.activation_checkpointing)
            )
        return settings


def test_that_a_model_cannot_be_recomputed_is_remembered_after_more_ends_than_the_status_keeps() -> None:
    unsupported = fail(
        **ALL_WEIGHTS, refusal=UNSUPPORTED, reduced=ReducedMemory(activation_checkpointing="Full")
    )
    before = unsupported.status.model_copy(update={"attempts": None})
    pod = ended("tune-train-2", 0, 1, GPU_ERROR)
    decision = conclude(ftj(before, **ALL_WEIGHTS), observed(child("tune-train-2", "Failed"), pods=[pod]))
    assert decision.status.reduced_memory == SMALLEST.model_copy(update={"activation_checkpointing": "None"})


RUNS: dict[str, tuple[Run, list[tuple[int, int, str]]]] = {
    "an adapter": (Run("LoRA", 4), [(2, 2, "None"), (1, 4, "None"), (1, 4, "Full")]),
    "all weights": (Run("Full", 4), [(4, 1, "Full"), (2, 2, "Full"), (1, 4, "Full")]),
    "one sequence": (Run("Full", 1), [(1, 1, "Full")]),
    "an adapter of a model that cannot be recomputed": (
        Run("LoRA", 2, can_recompute=False),
        [(1, 2, "None"), (1, 2, "Full")],
    ),
    "all weights of a model that cannot be recomputed": (
        Run("Full", 4, can_recompute=False),
        [(4, 1, "Full"), (2, 2, "None"), (1, 4, "None")],
    ),
}


@pytest.mark.parametrize(("run", "settings"), RUNS.values(), ids=RUNS)
def test_attempts_end_when_nothing_is_left(run: Run, settings: list[tuple[int, int, str]]) -> None:
    assert run.list_settings() == settings


# What failed, and is tried again as it is; then the remedy in status.lastFailure.
RETRIES: dict[str, tuple[Any, str]] = {
    "a host with nothing to reduce": (fail(host=True), "raise the limit"),
    "synchronous checkpoints": (
        fail(host=True, checkpoint={**CHECKPOINT, "mode": "Sync"}),
        "raise the limit",
    ),
    "a CPU with nothing to reduce": (
        fail(host=True, device=CPU, reduced=FULL),
        "raise the limit, or create a FineTuneJob with another name and a lower training.maxLength",
    ),
    "a command": (
        fail(host=True, device=CPU, trainer={"command": ["torchrun", "train.py"]}),
        "raise the limit, or reduce the memory that your command uses",
    ),
}


@pytest.mark.parametrize(("decision", "remedy"), RETRIES.values(), ids=RETRIES)
def test_the_next_attempt_is_the_same(decision: Any, remedy: str) -> None:
    after = decision.status
    assert (after.attempt, after.restarts) == (2, 1)
    assert after.last_failure.message == f"the container used more memory than its limit: {remedy}"
