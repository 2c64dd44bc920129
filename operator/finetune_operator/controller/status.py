"""Writes the status of a resource, and an Event for each changed condition."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime

from finetune_crds.base import API_VERSION, Json
from finetune_crds.conditions import ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.schedule_status import FineTuneScheduleStatus
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.controller import events
from finetune_operator.controller.events import Change, EventTarget
from finetune_operator.controller.store import Store
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

Status = FineTuneJobStatus | ModelPromotionStatus | FineTuneScheduleStatus


async def write_status(
    kube: Kube,
    store: Store,
    about: EventTarget,
    *,
    version: str,
    before: Status,
    after: Status,
    now: datetime,
) -> Json:
    """Write an Event for each changed condition, then the status. Returns the resource as written.

    NB: a pass that is interrupted between the two is repeated. It writes its Events again under the same names, so none appears twice.

    Args:
        version: the resource version that the decision is based on.

    Raises:
        KubeError: the resource changed meanwhile (409), or the API server refused or could not be reached.
    """
    body: Json = {
        "apiVersion": API_VERSION,
        "kind": about.kind,
        # NB: uid and version are preconditions: the status is valid only for the state that the decision is based on.
        "metadata": {
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
            "resourceVersion": version,
        },
        "status": after.to_json(),
    }
    changes = events.find_changes(before.conditions, after.conditions)
    await asyncio.gather(*(write_event(kube, about, change, now) for change in changes))
    written = await kube.apply(body, subresource="status")
    store.put(about.kind, written)
    if after.phase != before.phase:
        log.info("%s/%s is %s", about.namespace, about.name, _describe_phase(after))
    return written


async def write_event(kube: Kube, about: EventTarget, change: Change, now: datetime) -> None:
    """Write an Event, unless an interrupted pass wrote it. A refused Event is only logged: the status has the same message."""
    try:
        await kube.create(events.build_event(about, change, now))
    except KubeError as error:
        if error.reason != "AlreadyExists":
            log.warning(
                "failed to write the Event %s about %s/%s: %s",
                change.after.reason,
                about.namespace,
                about.name,
                error,
            )


def _describe_phase(status: Status) -> str:
    """The phase with its reason, such as Failed (RecipeWrong)."""
    phase = status.phase or "Unknown"
    reasons = (item.reason for item in status.conditions if item.type == ConditionType.READY)
    reason = next(reasons, phase)
    return phase if reason == phase else f"{phase} ({reason})"
