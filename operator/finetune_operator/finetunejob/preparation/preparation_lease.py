"""The Lease of a preparation: of several jobs with the same preparation, one job prepares the data, and the others wait.

The Lease in their namespace names the job that prepares. That job owns the Lease, so both are deleted together. The Lease is valid only
while its holder makes progress: if the holder failed, is suspended or cannot start its pods, another job takes the Lease. Two jobs that
prepare at once waste work but do no harm: each commit to the table is atomic, and the second job uses the first commit if it has the
same rows.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.preparation import digest_of, settings_digest
from finetune_operator import names
from finetune_operator.batch.state import is_being_deleted
from finetune_operator.finetunejob.decision import TakeLease
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import Wait, wait
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import template
from finetune_operator.owners import find_owner

# Reasons of Prepared while a job prepares, or is about to. With any other reason, the job waits for a person.
_WORKING_REASONS = (
    ConditionReason.PREPARING,
    ConditionReason.WAITING_FOR_PREPARATION,
    ConditionReason.QUEUED,
    # A run continues while its workspace is unreachable.
    ConditionReason.DATABRICKS_UNREACHABLE,
    ConditionReason.DATABRICKS_ERROR,
)
# Reasons that keep the pods of one job from running: its own template, image or account.
_STUCK_REASONS = (
    ConditionReason.NAME_TAKEN,
    ConditionReason.POD_TEMPLATE_INVALID,
    ConditionReason.IMAGE_PULL_FAILED,
    ConditionReason.CONTAINER_CONFIG_ERROR,
    ConditionReason.EXECUTORS_FAIL,
)
# Shortages of the cluster, which may affect the pods of any job: another job takes the Lease only after _SHORTAGE_TIMEOUT.
_SHORTAGE_REASONS = (
    ConditionReason.POD_REJECTED,
    ConditionReason.UNSCHEDULABLE,
    ConditionReason.VOLUME_NOT_READY,
)
_SHORTAGE_TIMEOUT = timedelta(minutes=15)


def lease_name(ftj: FineTuneJob) -> str | None:
    """The name of the Lease for a preparation with these settings and this table; None if the preparation is not shared."""
    spec = ftj.spec
    if spec is None or spec.data is None or spec.model is None:
        return None
    prepare = spec.data.prepare
    if prepare is None or prepare.reuse == "Never" or not prepare.output:
        return None
    settings = settings_digest(spec.data, spec.model, spec.objective)
    return names.prep_lease_name(digest_of(settings, prepare.output.rstrip("/")))


def wait_for_lease(draft: Draft) -> bool:
    """Report that another job prepares the same data, and return whether one does.

    If none does, take the Lease if it does not exist, if its holder is gone or makes no progress, or if the holder prepared the data
    before this job was created.
    """
    lease_state = draft.observed.lease
    if lease_state is None:
        # The job needs no Lease, or the operator is not allowed to read Leases.
        return False
    if lease_state.lease is None:
        draft.lease = TakeLease(_build_lease(draft))
        return False
    lease_owner = find_owner("Lease", lease_state.lease)
    # This job holds the Lease; or no FineTuneJob does, so that nobody else prepares the data.
    if lease_owner is None or lease_owner.uid == draft.ftj.uid:
        return False
    holder = lease_state.holder
    if holder is None or not _is_progressing(holder, draft.now):
        draft.lease = TakeLease(_build_lease(draft), replaces=lease_state.lease)
        return False
    prepared_since = _true_since(holder, ConditionType.PREPARED)
    if prepared_since is None:
        name = holder["metadata"]["name"]
        message = f"FineTuneJob {name} prepares the same data: this job waits for the table that {name} writes, and uses the table"
        wait(draft, ConditionType.PREPARED, Wait(ConditionReason.WAITING_FOR_PREPARATION, message))
        return True
    if draft.ftj.created is None or prepared_since <= draft.ftj.created:
        # The holder read its sources before this job was created: they may have changed since.
        draft.lease = TakeLease(_build_lease(draft), replaces=lease_state.lease)
    # If the holder prepared the data after this job was created, this job needs no Lease: its preparation finds the table, and uses it.
    return False


def _is_progressing(holder: Json, now: datetime) -> bool:
    """Whether a FineTuneJob has prepared its data, or will do so without the help of a person."""
    conditions = _conditions(holder)
    prepared = conditions.get(ConditionType.PREPARED, {})
    if prepared.get("status") == "True":
        return True
    if is_being_deleted(holder) or holder["spec"].get("suspend"):
        return False
    stopped = (ConditionType.FAILED, ConditionType.STALLED)
    if any(conditions.get(kind, {}).get("status") == "True" for kind in stopped):
        return False
    if prepared and prepared["reason"] not in _WORKING_REASONS:
        return False
    healthy = conditions.get(ConditionType.PODS_HEALTHY, {})
    return healthy.get("status") != "False" or not _is_stuck(healthy, now)


def _is_stuck(healthy: Json, now: datetime) -> bool:
    """Whether the pods of a holder cannot run without the help of a person, or have lacked resources for too long."""
    reason, since = healthy["reason"], datetime.fromisoformat(healthy["lastTransitionTime"])
    return reason in _STUCK_REASONS or (reason in _SHORTAGE_REASONS and now - since >= _SHORTAGE_TIMEOUT)


def _true_since(holder: Json, kind: ConditionType) -> datetime | None:
    """Since when a condition of a FineTuneJob is True; None if it is False or missing."""
    condition = _conditions(holder).get(kind, {})
    return (
        datetime.fromisoformat(condition["lastTransitionTime"]) if condition.get("status") == "True" else None
    )


def _conditions(holder: Json) -> dict[str, Json]:
    return {item["type"]: item for item in (holder.get("status") or {}).get("conditions") or []}


def _build_lease(draft: Draft) -> Json:
    name = lease_name(draft.ftj)
    if name is None:
        raise ValueError(f"{draft.ftj.key} shares no preparation")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": template.metadata(draft.ftj, name, names.PREP),
        "spec": {"holderIdentity": draft.ftj.name},
    }
