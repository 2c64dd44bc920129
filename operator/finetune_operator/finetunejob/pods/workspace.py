"""Jobs whose run and version are in a Databricks workspace: mistakes in their fields, and how their pods log in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finetune_crds.aliased import Aliased
from finetune_crds.base import Json
from finetune_crds.databricks import SECRET_KEYS
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.pods.secret_env import build_login
from finetune_operator.policy.unity_catalog import find_wrong_tags
from finetune_operator.settings import DATABRICKS, UNITY_CATALOG, Settings

# catalog.schema.name
_LEVELS = re.compile(r"[^./ ]+\.[^./ ]+\.[^./ ]+")
_VOLUMES = "/Volumes/"
_IN_WORKSPACE = (_VOLUMES, "dbfs:/", "/dbfs/")
_TOKEN_FOLDER = "/var/run/secrets/finetune.dev/databricks"  # noqa: S105
_TOKEN_SECONDS = 3600


def workspace_mistakes(spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
    """Yield the mistakes in a spec that includes the defaults of the chart; the schema checks the user's spec alone."""
    server, registry = settings.servers(spec.tracking)
    yield from _find_unreachable_folders(spec, settings)
    if spec.data and spec.data.splits and spec.data.splits.tables and server != DATABRICKS:
        yield (
            "spec.data.splits names tables of a Databricks workspace, which the training pods find with the login of spec.tracking: set "
            "spec.tracking.uri to databricks, or use type Delta with the path of a table"
        )
    is_run_in_workspace, is_model_in_workspace = server == DATABRICKS, registry == UNITY_CATALOG
    if spec.register_ and is_run_in_workspace != is_model_in_workspace:
        yield (
            f"the run would be tracked at {server or 'no server'} and the model registered at {registry}: set spec.tracking.uri to "
            f"{DATABRICKS} and spec.tracking.registryUri to {UNITY_CATALOG}, or remove both"
        )
    if server != DATABRICKS:
        return
    if spec.tracking.experiment and not spec.tracking.experiment.startswith("/"):
        yield (
            f"spec.tracking.experiment {spec.tracking.experiment} is not a path: in a workspace, use a path "
            "such as /Shared/support"
        )
    yield from _find_wrong_model_names(spec)
    if spec.register_ is None:
        return
    if not _LEVELS.fullmatch(spec.register_.model):
        yield f"spec.register.model {spec.register_.model} must be catalog.schema.name in Unity Catalog"
    if not spec.register_.signature:
        yield "spec.register.signature must be true for a model in Unity Catalog"
    yield from find_wrong_tags(spec.register_.tags, "spec.register.tags")


def _find_wrong_model_names(spec: FineTuneJobSpec) -> Iterator[str]:
    """Models that are named by an alias, but not as Unity Catalog requires: the job would wait forever for the alias."""
    distillation = spec.objective.distillation
    models = (
        ("spec.model.base", spec.model.base if spec.model else None),
        ("spec.objective.distillation.teacher", distillation.teacher if distillation else None),
    )
    for field, uri in models:
        aliased = Aliased.parse(uri)
        if aliased and not _LEVELS.fullmatch(aliased.model):
            yield f"{field} {uri} must be models:/catalog.schema.name@{aliased.alias} in Unity Catalog"


def _find_unreachable_folders(spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
    """Folders of a workspace that the training pods cannot reach."""
    output = spec.prepare.output if spec.prepare else ""
    if output.startswith(_IN_WORKSPACE):
        yield (
            f"spec.data.prepare.output {output} is a folder of a Databricks workspace, which the training pods cannot read: use the "
            "object storage behind it, or mount a volume in spec.pods"
        )
    checkpoint_uri = spec.checkpoint.uri if spec.checkpoint else ""
    is_in_volume = checkpoint_uri.startswith(_VOLUMES)
    if is_in_volume and not settings.on_databricks(spec.tracking):
        yield (
            f"spec.checkpoint.uri {checkpoint_uri} is in a Databricks workspace, which the training pods reach with the login of "
            "spec.tracking: set spec.tracking.uri to databricks, or use the object storage behind it"
        )
    elif checkpoint_uri.startswith(_IN_WORKSPACE) and not is_in_volume:
        yield (
            f"spec.checkpoint.uri {checkpoint_uri} is in DBFS, which the training pods cannot reach: use a volume of Unity Catalog, or "
            "object storage"
        )


def pod_login(spec: FineTuneJobSpec, settings: Settings, container: str) -> Json:
    """Return the part of a pod's template with the login to the workspace; empty for jobs on an MLflow server.

    NB: the pod gets only the four keys of a Secret, or without a Secret a token of its own ServiceAccount, valid for an hour. The
    operator's own login never reaches a pod.
    """
    if not settings.on_databricks(spec.tracking):
        return {}
    secret = spec.tracking.secret_of_pods
    if secret is None:
        return federated_login(settings, container)
    env = build_login(secret.name, SECRET_KEYS)
    return {"spec": {"containers": [{"name": container, "env": env}]}}


def federated_login(settings: Settings, name: str) -> Json:
    """Return the part of a pod's template that logs in to the chart's workspace with a token of the pod's ServiceAccount."""
    values = {
        "DATABRICKS_HOST": settings.databricks_host,
        "DATABRICKS_AUTH_TYPE": "file-oidc",
        "DATABRICKS_OIDC_TOKEN_FILEPATH": f"{_TOKEN_FOLDER}/token",
    }
    token = {
        "audience": settings.databricks_token_audience,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": "token",
    }
    mount = {"name": "databricks", "mountPath": _TOKEN_FOLDER, "readOnly": True}
    container = {
        "name": name,
        "env": [{"name": key, "value": value} for key, value in values.items()],
        "volumeMounts": [mount],
    }
    projected = {"name": "databricks", "projected": {"sources": [{"serviceAccountToken": token}]}}
    return {"spec": {"containers": [container], "volumes": [projected]}}
