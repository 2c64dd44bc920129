"""`spec.checkpoint`: the checkpoints of the job, and the checkpoints of another job to start from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    OPERATOR_DEFAULT,
    SHARED_FOLDER_FORMATS,
    ApiModel,
    ObjectName,
    Uri,
    is_shared_folder,
    rules,
)


class ResumeFrom(ApiModel):
    """The checkpoints of another job, from which this job continues."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.name) == (self.type == 'Job') && has(self.uri) == (self.type == 'Uri')",
                "set only the field that matches type: name for Job, uri for Uri",
            ),
            (
                f"!has(self.uri) || {is_shared_folder('self.uri')}",
                f"uri must be {SHARED_FOLDER_FORMATS}",
                ".uri",
            ),
        )
    )

    type: Literal["Job", "Uri"]
    """A FineTuneJob of the same namespace (Job), or a folder of checkpoints (Uri). This job starts once that
    FineTuneJob has finished or is suspended."""
    name: ObjectName | None = None
    """Name of the FineTuneJob."""
    uri: Uri | None = None
    """The folder of the checkpoints of a job, whose newest complete one is used, or one checkpoint, such as
    status.checkpoint.uri of a job. It is in an object store, or on a volume that all pods share."""


class Checkpoint(ApiModel):
    """The checkpoints from which a restart resumes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.uri) || {is_shared_folder('self.uri')}",
                f"uri must be {SHARED_FOLDER_FORMATS}",
                ".uri",
            )
        )
    )

    uri: Uri = ""
    """Folder for checkpoints: s3://bucket/folder, gs://bucket/folder,
    abfss://container@account.dfs.core.windows.net/folder, or an absolute path on a volume that all pods share. If
    tracking.uri is databricks, it can also be in /Volumes of the workspace. Each job has its own subfolder. Default: a
    folder in defaults.storage of the chart."""
    every_steps: Annotated[int, Field(ge=1, json_schema_extra=OPERATOR_DEFAULT)] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra=OPERATOR_DEFAULT)] = 2
    """Number of complete checkpoints to keep."""
    mode: Annotated[Literal["Async", "Sync"], Field(json_schema_extra=OPERATOR_DEFAULT)] = "Async"
    """Write a checkpoint during the next steps, from a copy in host memory (Async), or before the next step (Sync)."""
    resume_from: ResumeFrom | None = None
    """Checkpoints of another job to start from, until this job has a checkpoint. They are only read."""
