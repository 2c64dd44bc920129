"""The newest checkpoint: its location, and whether the trainer could write it."""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus
from finetune_operator.finetunejob.decide import progress
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import gang, pod_state


def record_checkpoint(draft: Draft, attempt_pods: list[Json]) -> None:
    """Record the newest checkpoint that MLflow or a terminated pod of the attempt reports, and whether saves succeed."""
    if draft.spec.checkpoint is None:
        return
    run = draft.observed.mlflow.run if draft.observed.mlflow else None
    reported = [
        ended.message.checkpoint_step
        for ended in pod_state.exits(attempt_pods, gang.CONTAINER)
        if ended.message
    ]
    logged = progress.to_count(run.metrics.get(contract.METRIC_CHECKPOINT_STEP)) if run else None
    step = max((item for item in (*reported, logged) if item is not None), default=None)
    if step is not None:
        folder = contract.job_folder(
            draft.spec.checkpoint.uri, namespace=draft.ftj.namespace, name=draft.ftj.name, uid=draft.ftj.uid
        )
        draft.update(checkpoint=CheckpointStatus(step=step, uri=contract.checkpoint_uri(folder, step)))
    error = run.tags.get(contract.TAG_CHECKPOINT_ERROR) if run else None
    if error:
        draft.set(ConditionType.CHECKPOINT_STORED, False, ConditionReason.CHECKPOINT_FAILED, error)
    elif step is not None and (run is not None or not _is_failing(draft)):
        # NB: while MLflow is unreachable, a recorded failure stays: whether a later save has succeeded is unknown.
        draft.set(
            ConditionType.CHECKPOINT_STORED,
            True,
            ConditionReason.CHECKPOINT_STORED,
            f"the checkpoint of step {step} is complete",
        )


def describe_start(draft: Draft) -> str:
    """Describe where the next attempt starts, as the end of a sentence about the attempt."""
    if draft.status.checkpoint:
        return "resumes from the newest checkpoint"
    if draft.spec.trainer.command:
        return "starts your command again"
    if draft.status.resumed_from:
        uri = draft.status.resumed_from.uri
        _folder, step = contract.split_checkpoint_uri(uri)
        if step is None:
            return f"starts from the newest checkpoint in {uri}"
        return f"starts from the checkpoint {uri}"
    why = "no checkpoint is recorded" if draft.spec.checkpoint else "spec.checkpoint is not set"
    return f"starts from the beginning: {why}"


def _is_failing(draft: Draft) -> bool:
    """Whether the status records a failed save."""
    stored = draft.condition(ConditionType.CHECKPOINT_STORED)
    return stored is not None and stored.status == "False"
