"""Builds the FineTuneJobs of a schedule from its template."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from finetune_crds.base import API_VERSION, Json
from finetune_crds.finetuneschedule import FineTuneScheduleSpec
from finetune_crds.schedule_status import TrainedData
from finetune_operator import names
from finetune_operator.finetuneschedule.model import KIND, Schedule
from finetune_operator.owners import build_owner_reference


def build_job(
    schedule: Schedule, spec: FineTuneScheduleSpec, start: datetime, zone: ZoneInfo, data: TrainedData | None
) -> Json:
    """Build the FineTuneJob for a start time.

    Args:
        zone: the time zone of the annotation with the start time.
        data: the job ends after its preparation if its data has this digest; None if it trains in any case.
    """
    metadata = spec.job_template.metadata
    job_annotations = {
        **metadata.annotations,
        names.ANNOTATION_START_TIME: start.astimezone(zone).isoformat(),
        **({names.ANNOTATION_TRAINED_DATA: data.digest} if data else {}),
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "FineTuneJob",
        "metadata": {
            "name": names.scheduled_job_name(schedule.name, start),
            "namespace": schedule.namespace,
            "labels": {**metadata.labels, names.LABEL_SCHEDULE: schedule.name},
            "annotations": job_annotations,
            "ownerReferences": [build_owner_reference(KIND, schedule.name, schedule.uid)],
        },
        "spec": spec.job_template.spec,
    }
