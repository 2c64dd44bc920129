"""tracking.sinks: the fields of each type, and the variables that the operator sets for them."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]
TENSORBOARD: Json = {"type": "TensorBoard", "uri": "s3://logs/tensorboard"}
WANDB: Json = {"type": "WandB", "project": "support"}
WITH_SECRET: Json = WANDB | {"entity": "my-team", "secretRef": {"name": "wandb"}}


def tracked(*sinks: Json, **spec: Any) -> Json:
    """A job with sinks."""
    return job(**({"tracking": {"sinks": [*sinks]}} | spec))


def with_env(role: str, name: str) -> Json:
    return {role: {"env": [{"name": name, "value": "x"}]}}


REFUSED: dict[str, tuple[Json, str]] = {
    "an unknown tracker": (tracked({"type": "Comet"}), 'Unsupported value: "Comet"'),
    "a tracker without a type": (tracked({"uri": "/logs"}), "type: Required value"),
    "TensorBoard without a folder": (
        tracked({"type": "TensorBoard"}),
        "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef",
    ),
    "a folder that is none": (
        tracked({"type": "TensorBoard", "uri": "logs"}),
        "uri must be s3://bucket/folder, gs://bucket/folder",
    ),
    "W&B without a project": (
        tracked({"type": "WandB"}),
        "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef",
    ),
    "W&B with a folder": (
        tracked(WANDB | {"uri": "/logs"}),
        "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef",
    ),
    "TensorBoard with a Secret": (
        tracked(TENSORBOARD | {"secretRef": {"name": "wandb"}}),
        "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef",
    ),
    "TensorBoard with an entity": (
        tracked(TENSORBOARD | {"entity": "me"}),
        "type TensorBoard requires uri, and type WandB requires project and allows entity and secretRef",
    ),
    "a project with a slash": (tracked(WANDB | {"project": "my-team/support"}), "should match"),
    "a Secret of another namespace": (
        tracked(WANDB | {"secretRef": {"name": "other/wandb"}}),
        "secretRef.name in body should match",
    ),
    "a tracker twice": (tracked(WANDB, WANDB | {"project": "other"}), "Duplicate value"),
    "a volume of Unity Catalog without Databricks": (
        tracked(TENSORBOARD | {"uri": "/Volumes/main/llm/logs"}),
        "the uri of a sink can be in a Databricks workspace only below /Volumes and when tracking.uri is databricks",
    ),
    **{
        f"{uri} with a command": (
            tracked(TENSORBOARD | {"uri": uri}, trainer={"command": ["train"]}),
            "when trainer.command is set, the uri of a TensorBoard sink must be in s3:// or on a volume",
        )
        for uri in (
            "gs://logs/tensorboard",
            "s3a://logs/tensorboard",
            "abfss://logs@account.dfs.core.windows.net/t",
        )
    },
    **{
        f"{name} in the environment of {role}": (
            tracked(TENSORBOARD, WITH_SECRET, pods=with_env(role, name)),
            "the operator sets TENSORBOARD_LOGGING_DIR, WANDB_RUN_ID, WANDB_RESUME, WANDB_NAME, WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY for tracking.sinks: remove them from pods",
        )
        for name, role in (
            ("TENSORBOARD_LOGGING_DIR", "train"),
            ("WANDB_RUN_ID", "all"),
            ("WANDB_ENTITY", "train"),
            ("WANDB_API_KEY", "all"),
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
    "both": tracked(TENSORBOARD, WITH_SECRET),
    "both with a command": tracked(TENSORBOARD, WITH_SECRET, trainer={"command": ["train"]}),
    "another store without a command": tracked(TENSORBOARD | {"uri": "gs://logs/tensorboard"}),
    "a folder on a volume": tracked({"type": "TensorBoard", "uri": "/mnt/logs"}),
    "a volume of Unity Catalog": job(
        tracking={"uri": "databricks", "sinks": [TENSORBOARD | {"uri": "/Volumes/main/llm/logs"}]},
        register={"model": "main.llm.tune"},
    ),
    # The operator sets only the variables of fields that are set.
    "a key of the environment": tracked(WANDB, pods=with_env("all", "WANDB_API_KEY")),
    "an entity of the environment": tracked(WANDB, pods=with_env("train", "WANDB_ENTITY")),
    "the address of a server": tracked(WITH_SECRET, pods=with_env("all", "WANDB_BASE_URL")),
    "variables without sinks": job(pods=with_env("train", "WANDB_RUN_ID")),
    "variables of another sink": tracked(TENSORBOARD, pods=with_env("all", "WANDB_RUN_ID")),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    body = ACCEPTED[case]
    sinks = body["spec"].get("tracking", {}).get("sinks")
    stored = dry_run.create(api, body)["spec"]["tracking"]
    # NB: no item of a list gets a default, so that Argo CD sees no difference.
    assert stored.get("sinks") == sinks
