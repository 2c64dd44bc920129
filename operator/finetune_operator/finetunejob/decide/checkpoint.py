"""The newest checkpoint: where it is, and whether the trainer could write it."""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus
from finetune_operator.finetunejob.decide import gang, pods, track
from finetune_operator.finetunejob.decide.draft import Draft


def note(draft: Draft, mine: list[Json]) -> None:
    """The newest checkpoint that MLflow, or a pod of the attempt at its end, reported; and what failed since."""
    if draft.spec.checkpoint is None:
        return
    run = draft.observed.mlflow.run if draft.observed.mlflow else None
    told = [ended.message.checkpoint_step for ended in pods.exits(mine, gang.CONTAINER) if ended.message]
    logged = track.integer(run.metrics.get(contract.METRIC_CHECKPOINT_STEP)) if run else None
    step = max((item for item in (*told, logged) if item is not None), default=None)
    if step is not None:
        folder = contract.checkpoint_folder(
            draft.spec.checkpoint.uri, namespace=draft.ftj.namespace, name=draft.ftj.name, uid=draft.ftj.uid
        )
        draft.update(checkpoint=CheckpointStatus(step=step, uri=contract.checkpoint_uri(folder, step)))
    error = run.tags.get(contract.TAG_CHECKPOINT_ERROR) if run else None
    if error:
        draft.set(ConditionType.CHECKPOINT_STORED, False, ConditionReason.CHECKPOINT_FAILED, error)
    elif step is not None and (run is not None or not _failing(draft)):
        # NB: while MLflow is away nobody knows whether what failed before has been made up for.
        draft.set(
            ConditionType.CHECKPOINT_STORED,
            True,
            ConditionReason.CHECKPOINT_STORED,
            f"the checkpoint of step {step} is complete",
        )


def _failing(draft: Draft) -> bool:
    found = draft.condition(ConditionType.CHECKPOINT_STORED)
    return found is not None and found.status == "False"
