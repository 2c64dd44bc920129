"""observe: the FineTuneJobs of a schedule, from the store, and the dry run of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus

from pydantic import ValidationError

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.finetuneschedule import FineTuneScheduleSpec
from finetune_crds.schedule_status import FineTuneScheduleStatus, TrainedData
from finetune_operator import names
from finetune_operator.controller.reading import read_spec, read_status
from finetune_operator.controller.store import Store
from finetune_operator.finetuneschedule.model import DryRunAnswer, Observed, Schedule, ScheduledJob
from finetune_operator.kube import Kube, KubeError
from finetune_operator.tenancy.model import Refusal
from finetune_operator.tenancy.permissions import Permissions

# What a refusal of the API server means: the template is wrong, or a policy or a quota forbids the FineTuneJob for now.
_REASONS: Mapping[int, ConditionReason] = {
    HTTPStatus.BAD_REQUEST: ConditionReason.JOB_TEMPLATE_INVALID,
    HTTPStatus.UNPROCESSABLE_ENTITY: ConditionReason.JOB_TEMPLATE_INVALID,
    HTTPStatus.FORBIDDEN: ConditionReason.JOB_TEMPLATE_REJECTED,
}


def read_schedule(body: Json) -> Schedule:
    """Return a FineTuneSchedule from its JSON. If the spec does not fit the schema, `invalid` has the reason.

    Raises:
        UnreadableStatusError: a newer version of the operator wrote the status.
    """
    meta = body["metadata"]
    spec, invalid = read_spec(FineTuneScheduleSpec, body)
    return Schedule(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        generation=int(meta.get("generation", 1)),
        created=datetime.fromisoformat(meta["creationTimestamp"]),
        spec=spec,
        status=read_status(FineTuneScheduleStatus, body, "schedule"),
        invalid=invalid,
        deleting="deletionTimestamp" in meta,
    )


def read_job(body: Json) -> ScheduledJob:
    """Return what a schedule needs of one of its FineTuneJobs."""
    meta, status = body["metadata"], body.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    succeeded = _is_true(conditions.get(ConditionType.SUCCEEDED))
    failed = _is_true(conditions.get(ConditionType.FAILED))
    end = conditions.get(ConditionType.SUCCEEDED if succeeded else ConditionType.FAILED, {})
    ended = status.get("completionTime") or end.get("lastTransitionTime")
    return ScheduledJob(
        name=meta["name"],
        uid=meta["uid"],
        start=names.find_start_time(meta["name"]) or datetime.fromisoformat(meta["creationTimestamp"]),
        ended=datetime.fromisoformat(ended) if succeeded or failed else None,
        succeeded=succeeded,
        is_unchanged=succeeded and end.get("reason") == ConditionReason.DATA_UNCHANGED,
        data=_read_data(meta["name"], status.get("data") or {}),
        deleting="deletionTimestamp" in meta,
    )


def _is_true(condition: Json | None) -> bool:
    return condition is not None and condition["status"] == "True"


def _read_data(job: str, data: Json) -> TrainedData | None:
    """The data of a job; None if its preparation computed no digest."""
    if not data.get("digest"):
        return None
    return TrainedData(
        job=job,
        digest=data["digest"],
        source_version=data.get("sourceVersion"),
        source_revision=data.get("sourceRevision"),
    )


def explain_refusal(error: KubeError, body: Json) -> DryRunAnswer | None:
    """The answer for a FineTuneJob that the API server refuses; None if the error says nothing about the FineTuneJob."""
    reason = _REASONS.get(error.status)
    if reason is None:
        return None
    message = f"the API server refuses FineTuneJob {body['metadata']['name']} of spec.jobTemplate: {error}"
    return DryRunAnswer(admitted=False, reason=reason, message=message)


@dataclass
class FineTuneScheduleObserver:
    """Reads the store for one schedule at a time.

    Attributes:
        permissions: what the tenants may use; None: everything.
    """

    kube: Kube
    store: Store
    permissions: Permissions | None = None

    def observe(self, schedule: Schedule) -> Observed:
        """Return the FineTuneJobs of a schedule."""
        bodies = self.store.finetunejobs_of((schedule.namespace, schedule.uid))
        return Observed(jobs=tuple(read_job(body) for body in bodies), refusal=self._find_refusal(schedule))

    def _find_refusal(self, schedule: Schedule) -> Refusal | None:
        """Return why the FineTuneJobs of a schedule would not be permitted. A template that cannot be read is refused by its dry run."""
        if self.permissions is None:
            return None
        job = names.scheduled_job_name(schedule.name, schedule.created)
        template = schedule.spec.job_template.spec if schedule.spec else {}
        try:
            spec = FineTuneJobSpec.model_validate(template)
        except ValidationError:
            return self.permissions.refuse_job(schedule.namespace, None, None)
        if spec.register_ and not spec.register_.model:
            registration = spec.register_.model_copy(update={"model": job})
            spec = spec.model_copy(update={"register_": registration})
        return self.permissions.refuse_job(schedule.namespace, spec, spec)

    async def dry_run(self, body: Json) -> DryRunAnswer:
        """Whether the API server would create a FineTuneJob. One of this name that exists does not matter.

        Raises:
            KubeError: the API server cannot be reached, or does not answer the question.
        """
        try:
            await self.kube.create(body, dry_run=True)
        except KubeError as error:
            answer = explain_refusal(error, body)
            if answer:
                return answer
            if error.status != HTTPStatus.CONFLICT:
                raise
        return DryRunAnswer(
            admitted=True,
            reason=ConditionReason.ACCEPTED,
            message="the API server accepts the FineTuneJobs of spec.jobTemplate",
        )
