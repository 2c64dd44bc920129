"""`spec.checkpoint`: the checkpoints of the job, and the checkpoints of another job to start from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    FOLDER_FORMATS,
    OPERATOR_DEFAULT,
    STORED_FOLDER_PATTERN,
    ApiModel,
    ObjectName,
    Uri,
    rules,
)


class ResumeFrom(ApiModel):
    """The checkpoints of another job, from which this job continues."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.name) == (self.type == 'Job')",
                "name is required when type is Job, and forbidden otherwise",
                ".name",
            ),
            (
                "has(self.uri) == (self.type == 'Uri')",
                "uri is required when type is Uri, and forbidden otherwise",
                ".uri",
            ),
            (
                f"!has(self.uri) || self.uri.matches('{STORED_FOLDER_PATTERN}')",
                f"uri must be {FOLDER_FORMATS} on a volume that all pods share",
                ".uri",
            ),
        )
    )

    type: Literal["Job", "Uri"]
    """Job: a FineTuneJob of the same namespace. This job starts once that job has finished or is suspended. Uri: a folder of
    checkpoints."""
    name: ObjectName | None = None
    """Name of the FineTuneJob."""
    uri: Uri | None = None
    """A folder in an object store, or an absolute path on a volume that all pods share. Either the folder of
    a job's checkpoints, of which the newest complete one is used, or one checkpoint, such as status.checkpoint.uri of a job."""


class Checkpoint(ApiModel):
    """The checkpoints from which a restart resumes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.uri) || self.uri.matches('{STORED_FOLDER_PATTERN}')",
                f"uri must be {FOLDER_FORMATS} on a volume that all pods share",
                ".uri",
            )
        )
    )

    uri: Uri = ""
    """Folder for checkpoints: s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder,
    or an absolute path on a volume that all pods share; if tracking.uri is databricks, also /Volumes of the workspace. Each
    job has its own subfolder. Default: a folder in defaults.storage of the chart."""
    every_steps: Annotated[int, Field(ge=1, json_schema_extra=OPERATOR_DEFAULT)] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra=OPERATOR_DEFAULT)] = 2
    """Number of complete checkpoints to keep."""
    mode: Annotated[Literal["Async", "Sync"], Field(json_schema_extra=OPERATOR_DEFAULT)] = "Async"
    """Async: write a checkpoint during the next steps, from a copy in host memory. Sync: write it before the next step."""
    resume_from: ResumeFrom | None = None
    """Checkpoints of another job to start from, until this job has a checkpoint. They are only read."""
