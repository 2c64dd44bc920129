"""Reports once that the NetworkPolicy of a running job cannot be created again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.controller import status as status_writer
from finetune_operator.controller.events import Change, EventTarget
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.kube import Kube

log = logging.getLogger(__name__)


@dataclass
class FailedRestores:
    """The NetworkPolicies that could not be created although the Job of their step exists."""

    kube: Kube
    _reported: dict[str, str] = field(default_factory=dict)
    """By uid of the job: the last message."""

    async def report(
        self, ftj: FineTuneJob, body: Json, reason: ConditionReason, error: Exception, now: datetime
    ) -> None:
        """Log an error and write an Event, unless the job's last error was the same.

        NB: the Event of the same error has the same name, so an operator that starts again does not repeat it.
        """
        kind, name = body["kind"], body["metadata"]["name"]
        message = f"{kind} {name} cannot be created, and the running pods go on without it: {error}"
        if self._reported.get(ftj.uid) == message:
            return
        self._reported[ftj.uid] = message
        log.warning("%s: %s", ftj.key, message)
        condition = Condition(
            type=ConditionType.PODS_HEALTHY,
            status="False",
            reason=reason,
            message=message,
            last_transition_time=now,
        )
        about = EventTarget("FineTuneJob", ftj.name, ftj.namespace, ftj.uid)
        await status_writer.write_event(self.kube, about, Change(None, condition), now)

    def forget(self, ftj: FineTuneJob) -> None:
        """Report the next error of a job, whatever it is."""
        self._reported.pop(ftj.uid, None)
