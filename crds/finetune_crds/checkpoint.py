"""`spec.checkpoint`: where checkpoints are written, and those of another job to start from."""

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
    """Checkpoints of another job, which this job carries on."""

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
    """Job: a FineTuneJob of the same namespace, when it has finished or is suspended. Uri: the folder of a job's checkpoints."""
    name: ObjectName | None = None
    """The FineTuneJob."""
    uri: Uri | None = None
    """A folder of an object store, or an absolute path on a volume that all pods share: the folder of a job's checkpoints, whose
    newest complete one is taken, or one of them, as status.checkpoint.uri of a job names it."""


class Checkpoint(ApiModel):
    """Checkpoints, from which a restart resumes."""

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
    """s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute path on a volume
    that all pods share, or, with tracking.uri databricks, in /Volumes of the workspace. Each job has its own folder in it. Default: a
    folder of the storage that the operator is installed with."""
    every_steps: Annotated[int, Field(ge=1, json_schema_extra=OPERATOR_DEFAULT)] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra=OPERATOR_DEFAULT)] = 2
    """Number of complete checkpoints to keep."""
    mode: Annotated[Literal["Async", "Sync"], Field(json_schema_extra=OPERATOR_DEFAULT)] = "Async"
    """Async: write a checkpoint during the next steps, from a copy in host memory. Sync: write it before the next step."""
    resume_from: ResumeFrom | None = None
    """Checkpoints of another job to start from, while this job has none of its own. They are only read."""
