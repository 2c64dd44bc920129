"""Events: one for each condition that changed its status or its reason."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import Condition, Reason, Type
from finetune_operator import names
from finetune_operator.model import Json
from finetune_operator.wording import stamp

_MAX_MESSAGE = 1024
# Conditions whose being False is bad news; for the others it means "not yet".
_WARN_WHEN_FALSE = {
    Type.ACCEPTED,
    Type.TRACKED,
    Type.PODS_HEALTHY,
    Type.CHECKPOINT_STORED,
    Type.REGISTRY_READY,
    Type.GATES_PASSED,
}
_WARN = {
    Reason.RESTARTING,
    Reason.JOB_FAILED,
    Reason.APPROVAL_TIMED_OUT,
    Reason.NOTHING_TO_ROLL_BACK_TO,
    Reason.MOVE_REFUSED,
    Reason.CONFLICT,
    Reason.CREDENTIALS_MISSING,
    Reason.CREDENTIALS_UNREADABLE,
    Reason.INTERNAL_ERROR,
    Reason.WITHDRAWN,
    Reason.ALIAS_MOVED,
    Reason.ALIAS_REMOVED,
    Reason.ENDPOINT_FAILED,
    Reason.CANARY_FAILED,
    Reason.DATABRICKS_FORBIDDEN,
    Reason.DATABRICKS_UNREACHABLE,
    Reason.DATABRICKS_ERROR,
    Reason.DATABRICKS_NOT_CONFIGURED,
}
_SILENT = {
    Reason.MLFLOW_NOT_CONFIGURED,
    Reason.PODS_RUNNING,
    Reason.NO_PODS,
    Reason.RUN_FINISHED,
    Reason.NO_GATES,
    Reason.IN_PLACE,
}
# What says a job's end, or why an alias is not where it should be, has often been said by another condition.
_SUMMARIES = {Type.FAILED, Type.PROMOTED}
# A new message is news too: it is about another version.
_BY_MESSAGE = {Type.SOURCE_READY, Type.GATES_PASSED, Type.APPROVED, Type.PROMOTED, Type.DRIFTED}


@dataclass(frozen=True)
class About:
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str
    uid: str


def changes(before: Sequence[Condition], after: Sequence[Condition]) -> list[Condition]:
    """The conditions that say something new, each thing once: what made a job fail is said by Failed alone."""
    known = {item.type: item for item in before}
    new = [item for item in after if _is_news(known.get(item.type), item)]
    failed = {(item.reason, item.message) for item in new if item.type == Type.FAILED}
    told = {(item.reason, item.message) for item in new if item.type not in _SUMMARIES}
    return [
        item
        for item in new
        if item.type == Type.FAILED
        or (item.type == Type.PROMOTED and (item.reason, item.message) not in told)
        or (item.type not in _SUMMARIES and (item.reason, item.message) not in failed)
    ]


def _is_news(before: Condition | None, after: Condition) -> bool:
    if after.reason in _SILENT or (after.type == Type.ACCEPTED and after.status == "True"):
        return False
    if after.type == Type.REGISTRY_READY and after.status == "True" and before is None:
        return False
    if before is None or (before.status, before.reason) != (after.status, after.reason):
        return True
    return after.type in _BY_MESSAGE and before.message != after.message


def event(about: About, condition: Condition, now: datetime) -> Json:
    """A core/v1 Event."""
    bad = condition.type == Type.FAILED or (condition.reason in _WARN and condition.type != Type.SUCCEEDED)
    bad = bad or (condition.status == "False" and condition.type in _WARN_WHEN_FALSE)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about.name}.{uuid.uuid4().hex[:16]}", "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
        "type": "Warning" if bad else "Normal",
        "reason": condition.reason,
        "message": condition.message[:_MAX_MESSAGE],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": 1,
    }
