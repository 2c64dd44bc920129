"""Events: one for each condition that changed its status or its reason."""

from __future__ import annotations

import uuid
from datetime import datetime

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import Condition, Reason, Type
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.model import Job, Json

_MAX_MESSAGE = 1024
# Conditions whose being False is bad news; for the others it means "not yet".
_WARN_WHEN_FALSE = {Type.ACCEPTED, Type.TRACKED, Type.PODS_HEALTHY, Type.CHECKPOINT_STORED}
_SILENT = {Reason.MLFLOW_NOT_CONFIGURED, Reason.PODS_RUNNING, Reason.NO_PODS, Reason.RUN_FINISHED}


def changes(before: FineTuneJobStatus, after: FineTuneJobStatus) -> list[Condition]:
    """The conditions that say something new; what made a job fail is said once, by Failed."""
    known = {item.type: (item.status, item.reason) for item in before.conditions}
    new = [
        item
        for item in after.conditions
        if known.get(item.type) != (item.status, item.reason)
        and item.reason not in _SILENT
        and not (item.type == Type.ACCEPTED and item.status == "True")
    ]
    failed = {(item.reason, item.message) for item in new if item.type == Type.FAILED}
    return [item for item in new if item.type == Type.FAILED or (item.reason, item.message) not in failed]


def event(job: Job, condition: Condition, now: datetime) -> Json:
    """A core/v1 Event about a job."""
    bad = condition.type == Type.FAILED or condition.reason == Reason.RESTARTING
    bad = bad or (condition.status == "False" and condition.type in _WARN_WHEN_FALSE)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{uuid.uuid4().hex[:16]}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "FineTuneJob",
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": "Warning" if bad else "Normal",
        "reason": condition.reason,
        "message": condition.message[:_MAX_MESSAGE],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
