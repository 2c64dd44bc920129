"""Events: one for each condition whose status or reason changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from finetune_crds.base import API_VERSION, Json
from finetune_crds.conditions import SUMMARY, Condition, ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.text import format_time

_MAX_MESSAGE_CHARS = 1024
_NAME_DIGITS = 16
# Conditions for which the status False is a failure. For any other condition, False means "not yet".
_WARN_WHEN_FALSE = {
    ConditionType.ACCEPTED,
    ConditionType.CODE_RESOLVED,
    ConditionType.TRACKED,
    ConditionType.PODS_ADMITTED,
    ConditionType.PODS_HEALTHY,
    ConditionType.CHECKPOINT_STORED,
    ConditionType.REGISTRY_READY,
    ConditionType.GATES_PASSED,
}
# Reasons that are failures, whatever the status of their condition.
_WARNING_REASONS = {
    ConditionReason.ACCEPTED_WITH_WARNING,
    ConditionReason.INVALID_SPEC,
    ConditionReason.SPEC_UNREADABLE,
    ConditionReason.INSTALLATION_MISMATCH,
    ConditionReason.NOT_PERMITTED,
    ConditionReason.QUEUE_INADMISSIBLE,
    ConditionReason.CHECK_FAILED,
    ConditionReason.RESTARTING,
    ConditionReason.PREPARED_WITH_WARNING,
    ConditionReason.JOB_FAILED,
    ConditionReason.APPROVAL_TIMED_OUT,
    ConditionReason.GATE_NOT_STARTED,
    ConditionReason.SOURCE_UNREADABLE,
    ConditionReason.COPY_NOT_STARTED,
    ConditionReason.COPY_FAILED,
    ConditionReason.NOTHING_TO_ROLL_BACK_TO,
    ConditionReason.MOVE_REFUSED,
    ConditionReason.CONFLICT,
    ConditionReason.CREDENTIALS_MISSING,
    ConditionReason.CREDENTIALS_UNREADABLE,
    ConditionReason.INTERNAL_ERROR,
    ConditionReason.WITHDRAWN,
    ConditionReason.BREACHED,
    ConditionReason.REGRESSED,
    ConditionReason.METRIC_INCONCLUSIVE,
    ConditionReason.PROMETHEUS_UNREACHABLE,
    ConditionReason.PROMETHEUS_FORBIDDEN,
    ConditionReason.PROMETHEUS_ERROR,
    ConditionReason.ALIAS_MOVED,
    ConditionReason.ALIAS_REMOVED,
    ConditionReason.ENDPOINT_FAILED,
    ConditionReason.CANARY_FAILED,
    ConditionReason.MLFLOW_UNREACHABLE,
    ConditionReason.MLFLOW_HOST_NOT_ALLOWED,
    ConditionReason.MLFLOW_FORBIDDEN,
    ConditionReason.MLFLOW_ERROR,
    ConditionReason.DATABRICKS_FORBIDDEN,
    ConditionReason.DATABRICKS_UNREACHABLE,
    ConditionReason.DATABRICKS_ERROR,
    ConditionReason.DATABRICKS_NOT_CONFIGURED,
    ConditionReason.START_TIME_MISSED,
    ConditionReason.NAME_TAKEN,
}
# Reasons that only mean a wait, even in a condition for which False is a failure.
_NORMAL_REASONS = {ConditionReason.SCALING_UP}
# Reasons that are not reported, except as reasons of Accepted.
_SILENT_REASONS = {
    ConditionReason.MLFLOW_NOT_CONFIGURED,
    ConditionReason.STORAGE_NOT_CONFIGURED,
    ConditionReason.SPLITS_GIVEN,
    ConditionReason.PODS_ADMITTED,
    ConditionReason.NOT_CHECKED,
    ConditionReason.PODS_RUNNING,
    ConditionReason.NO_PODS,
    ConditionReason.RUN_FINISHED,
    ConditionReason.NO_GATES,
    ConditionReason.IN_PLACE,
}
# Conditions that often repeat the reason and message of another condition.
_REPEATING = {ConditionType.FAILED, ConditionType.PROMOTED}
# Conditions for which a new message is reported even if status and reason stay the same: the new message is about another version or start time.
_REPORTED_BY_MESSAGE = {
    ConditionType.SOURCE_READY,
    ConditionType.GATES_PASSED,
    ConditionType.APPROVED,
    ConditionType.PROMOTED,
    ConditionType.DRIFTED,
    ConditionType.SCHEDULED,
}


@dataclass(frozen=True)
class EventTarget:
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str
    uid: str


class Change(NamedTuple):
    """A condition before a pass (None if it did not exist) and after it."""

    before: Condition | None
    after: Condition


def find_changes(before: Sequence[Condition], after: Sequence[Condition]) -> list[Change]:
    """The changes to report, each cause once.

    If Failed repeats a condition, only Failed is reported; if Promoted repeats a condition, only that condition is.
    """
    previous = {item.type: item for item in before}
    reportable = [item for item in after if _is_reportable(previous.get(item.type), item)]
    failed = next((item for item in reportable if item.type == ConditionType.FAILED), None)
    causes = {(item.reason, item.message) for item in reportable if item.type not in _REPEATING}

    def is_reported_elsewhere(item: Condition) -> bool:
        if item.type == ConditionType.FAILED:
            return False
        if item.type == ConditionType.PROMOTED:
            return (item.reason, item.message) in causes
        return failed is not None and _repeats(failed, item)

    return [Change(previous.get(item.type), item) for item in reportable if not is_reported_elsewhere(item)]


def _repeats(failed: Condition, item: Condition) -> bool:
    """Whether Failed repeats a condition. NB: Failed may add to the condition's message how to apply a corrected job."""
    return failed.reason == item.reason and failed.message.startswith(item.message)


def _is_reportable(before: Condition | None, after: Condition) -> bool:
    """Whether the change of a condition needs an Event."""
    if after.type in SUMMARY:
        return False
    # An accepted resource is normal. Any other reason of Accepted is reported, even a reason in _SILENT_REASONS.
    if (after.type, after.reason) == (ConditionType.ACCEPTED, ConditionReason.ACCEPTED):
        return False
    if after.reason in _SILENT_REASONS and after.type != ConditionType.ACCEPTED:
        return False
    # A registry that answers from the start is normal.
    if after.type == ConditionType.REGISTRY_READY and after.status == "True" and before is None:
        return False
    if before is None or (before.status, before.reason) != (after.status, after.reason):
        return True
    return after.type in _REPORTED_BY_MESSAGE and before.message != after.message


def build_event(about: EventTarget, change: Change, now: datetime) -> Json:
    """A core/v1 Event. An Event about the same change of the same object has the same name."""
    condition = change.after
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": _build_name(about, change), "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        },
        "type": "Warning" if _is_warning(condition) else "Normal",
        "reason": condition.reason,
        "message": condition.message[:_MAX_MESSAGE_CHARS],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": format_time(now),
        "lastTimestamp": format_time(now),
        "count": 1,
    }


def _is_warning(condition: Condition) -> bool:
    if condition.reason in _NORMAL_REASONS:
        return False
    if condition.type == ConditionType.FAILED or condition.reason in _WARNING_REASONS:
        return True
    return condition.status == "False" and condition.type in _WARN_WHEN_FALSE


def _build_name(about: EventTarget, change: Change) -> str:
    """The name of an Event; a pass that repeats an interrupted pass builds the same name.

    NB: the digest omits the new condition's time, which differs in the repeated pass. It includes the old condition's time, so that
    a change that occurs again later gets another name.
    """
    before, after = change
    previous = before.to_json() if before else None
    parts = [about.uid, previous, after.type, after.status, after.reason, after.message]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{about.name}.{digest[:_NAME_DIGITS]}"
