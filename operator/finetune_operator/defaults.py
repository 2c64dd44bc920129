"""What an installation fills in where a FineTuneJob says nothing: storage, credentials, pod template, queue."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from finetune_crds.base import (
    ENV_NAME,
    SUBDOMAIN,
    ApiModel,
    Name,
    ObjectName,
    Passthrough,
    Positive,
    QueueName,
    Uri,
)
from finetune_crds.env import RESERVED_ENV, EnvFromSource, EnvVar, ObjectReference
from finetune_crds.training import ModelCache


class DefaultsError(ValueError):
    """The file with the defaults cannot be read, or does not fit."""


def _check(found: Iterable[str | None], pattern: str, what: str) -> None:
    for name in found:
        if name is not None and not re.fullmatch(pattern, name):
            raise ValueError(f"{name!r} cannot be {what}")


class CheckpointDefaults(ApiModel):
    """Checkpoints of jobs that do not describe their own."""

    model_config = ConfigDict(extra="forbid")

    every_steps: Positive | None = None
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100)] | None = None
    """Number of complete checkpoints to keep."""
    mode: Literal["Async", "Sync"] | None = None
    """Whether a checkpoint is written during the next steps."""


class Defaults(ApiModel):
    """The defaults of an installation; every part is optional."""

    model_config = ConfigDict(extra="forbid")

    storage: Uri | None = None
    """Folder of splits and checkpoints, such as s3://bucket/root."""
    env: list[EnvVar] = Field(default_factory=list)
    """Environment variables of all pods of all jobs."""
    env_from: list[EnvFromSource] = Field(default_factory=list)
    """Secrets and ConfigMaps of the job's namespace whose keys become environment variables of all pods."""
    image_pull_secrets: list[ObjectReference] = Field(default_factory=list)
    """Secrets of the job's namespace with registry credentials."""
    pod_template: Passthrough | None = None
    """A PodTemplateSpec under the podTemplate of each job's training pods."""
    queue_name: QueueName | None = None
    """Kueue queue."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of all pods."""
    model_cache: ModelCache | None = None
    """Where downloaded models stay."""
    checkpoint: CheckpointDefaults = Field(default_factory=CheckpointDefaults)
    """Checkpoints of jobs that do not describe their own."""

    @model_validator(mode="after")
    def _checked(self) -> Defaults:
        """NB: the rules of the schema are the API server's, which never sees this file."""
        objects = [*(secret.name for secret in self.image_pull_secrets), self.service_account_name]
        objects += [self.model_cache.claim_name] if self.model_cache else []
        objects += [
            ref.name for item in self.env_from for ref in (item.secret_ref, item.config_map_ref) if ref
        ]
        _check(objects, SUBDOMAIN, "the name of an object")
        _check([self.queue_name], SUBDOMAIN, "the name of a queue")
        _check([item.name for item in self.env], ENV_NAME, "the name of a variable")
        taken = [item.name for item in self.env if item.name in RESERVED_ENV]
        if taken:
            raise ValueError(f"the operator sets {', '.join(taken)}: remove it")
        return self

    def folder(self, *parts: Name) -> str:
        """A folder of the storage; empty without storage."""
        return "/".join((self.storage.rstrip("/"), *parts)) if self.storage else ""

    @classmethod
    def load(cls, path: str) -> Defaults:
        """Read a file of defaults.

        Raises:
            DefaultsError: the file is missing, is no YAML, or does not fit; the message says where.
        """
        try:
            return cls.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DefaultsError(f"the defaults {path} cannot be read: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the top"
            raise DefaultsError(f"the defaults {path} are wrong at {where}: {first['msg']}") from error
