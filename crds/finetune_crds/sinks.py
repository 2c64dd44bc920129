"""`spec.tracking.sinks`: trackers that get the metrics besides MLflow, and the variables by which your own command finds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    FOLDER_FORMATS,
    STORED_FOLDER_PATTERN,
    ApiModel,
    Rule,
    Uri,
    join_names,
    list_type_map,
    rules,
)
from finetune_crds.databricks import IN_WORKSPACE, ON_DATABRICKS
from finetune_crds.env import LocalReference
from finetune_crds.own_script import HAS_COMMAND
from finetune_crds.pods import list_env_names

# The variables of W&B's client, and that of the Trainer of Hugging Face for TensorBoard.
ENV_WANDB_RUN_ID = "WANDB_RUN_ID"
ENV_WANDB_RESUME = "WANDB_RESUME"
ENV_WANDB_NAME = "WANDB_NAME"
ENV_WANDB_PROJECT = "WANDB_PROJECT"
ENV_WANDB_ENTITY = "WANDB_ENTITY"
ENV_WANDB_API_KEY = "WANDB_API_KEY"
ENV_TENSORBOARD_FOLDER = "TENSORBOARD_LOGGING_DIR"

# Where TensorBoard's own writer can append events: it loses events in other stores.
_CLIENT_FOLDER = "^(s3://|/)"
_SINKS = "self.tracking.sinks"
# The variables that the operator sets for a sink, and the CEL condition on the sink `s` under which it sets them.
_WANDB_ENV = (ENV_WANDB_RUN_ID, ENV_WANDB_RESUME, ENV_WANDB_NAME, ENV_WANDB_PROJECT)
_ENV_CONDITIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((ENV_TENSORBOARD_FOLDER,), "s.type == 'TensorBoard'"),
    (_WANDB_ENV, "s.type == 'WandB'"),
    ((ENV_WANDB_ENTITY,), "has(s.entity)"),
    ((ENV_WANDB_API_KEY,), "has(s.secretRef)"),
)

# W&B's names of projects and entities become parts of addresses.
_WandbName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%: ]+$")]


class Sink(ApiModel):
    """A tracker besides MLflow."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.uri) == (self.type == 'TensorBoard') && has(self.project) == (self.type == 'WandB') && "
                "(self.type == 'WandB' || !has(self.entity) && !has(self.secretRef))",
                "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef: set no other of these "
                "fields",
            ),
            (
                f"!has(self.uri) || self.uri.matches('{STORED_FOLDER_PATTERN}')",
                f"uri must be {FOLDER_FORMATS} on a volume",
                ".uri",
            ),
        )
    )

    type: Literal["TensorBoard", "WandB"]
    """Event files in a folder (TensorBoard), or a run of Weights & Biases (WandB). The run of Weights & Biases is the
    same for all attempts; its id is the uid of the job."""
    uri: Uri | None = None
    """TensorBoard: folder for event files, with the formats of checkpoint.uri. Each job has its own subfolder."""
    project: _WandbName | None = None
    """WandB: name of the project."""
    entity: _WandbName | None = None
    """WandB: user or team of the project. Default: the default entity of the API key."""
    secret_ref: LocalReference | None = None
    """WandB: Secret with WANDB_API_KEY. Default: the environment of the pods."""


Sinks = Annotated[list[Sink], Field(max_length=2, json_schema_extra=list_type_map("type"))]
"""Trackers besides MLflow, at most one of each type."""


def find_sink(sinks: Sequence[Sink], sink_type: Literal["TensorBoard", "WandB"]) -> Sink | None:
    """Return the sink of a type; None without one."""
    return next((sink for sink in sinks if sink.type == sink_type), None)


def is_client_folder(folder: str) -> bool:
    """Whether TensorBoard's own writer, which commands use, can write to a folder."""
    return re.match(_CLIENT_FOLDER, folder) is not None and not folder.startswith("/Volumes/")


def list_reserved_env(sinks: Sequence[Sink]) -> list[str]:
    """Return the names of the variables that the operator sets for the sinks, in training and evaluation pods."""
    names: list[str] = []
    if find_sink(sinks, "TensorBoard"):
        names += [ENV_TENSORBOARD_FOLDER]
    if wandb := find_sink(sinks, "WandB"):
        names += _WANDB_ENV
        names += [ENV_WANDB_ENTITY] if wandb.entity else []
        names += [ENV_WANDB_API_KEY] if wandb.secret_ref else []
    return names


def _build_env_rule() -> Rule:
    """Return the rule that the variables of `spec.pods` include none that the operator sets for the sinks."""
    is_reserved = " || ".join(f"(name in {[*names]} && {condition})" for names, condition in _ENV_CONDITIONS)
    names = join_names([name for group, _ in _ENV_CONDITIONS for name in group])
    return Rule(
        f"!has({_SINKS}) || !has(self.pods) || "
        f"!({list_env_names('all', 'train', 'evaluate')}).exists(name, {_SINKS}.exists(s, {is_reserved}))",
        f"the operator sets {names} for tracking.sinks: remove them from pods",
        ".pods",
    )


SINK_RULES = (
    Rule(
        f"!has({_SINKS}) || {_SINKS}.all(s, !has(s.uri) || !s.uri.{IN_WORKSPACE} || "
        f"({ON_DATABRICKS} && s.uri.startsWith('/Volumes/')))",
        "the uri of a sink can be in a Databricks workspace only below /Volumes and when tracking.uri is databricks",
        ".tracking.sinks",
    ),
    Rule(
        f"!has({_SINKS}) || !{HAS_COMMAND} || "
        f"{_SINKS}.all(s, !has(s.uri) || (s.uri.matches('{_CLIENT_FOLDER}') && !s.uri.startsWith('/Volumes/')))",
        "when trainer.command is set, the uri of a TensorBoard sink must be in s3:// or on a volume: TensorBoard's own writer "
        "loses events in other stores",
        ".tracking.sinks",
    ),
    _build_env_rule(),
)
"""Rules of FineTuneJobSpec."""
