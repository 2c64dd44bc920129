"""The Job of a gate."""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.gates import DEFAULT_TIMEOUT_SECONDS, JobGate
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.pods import MAIN_CONTAINER, PodSettings
from finetune_operator import names
from finetune_operator.batch.default_requests import add_default_requests
from finetune_operator.batch.pod_defaults import TMP, build_pod_defaults
from finetune_operator.batch.pod_settings import as_template, build_pull_secrets, merge_templates
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.modelpromotion.pods.job import wrap_pod
from finetune_operator.settings import Settings


def build_job(
    promotion: Promotion,
    spec: ModelPromotionSpec,
    settings: Settings,
    *,
    gate: JobGate,
    version: str,
    name: str,
) -> Json:
    """Build the Job that judges a version. `add_run` adds its MLflow run."""
    pod = _build_pod(spec, settings, gate, version)
    return wrap_pod(
        promotion, pod, name=name, component=names.GATE, version=version, retries=gate.retries or 0
    )


def _build_pod(spec: ModelPromotionSpec, settings: Settings, gate: JobGate, version: str) -> Json:
    """The pod template: the operator's defaults, the chart's, the gate's, and the fields that the operator owns."""
    defaults = build_pod_defaults(
        MAIN_CONTAINER,
        gate.image,
        is_product_image=gate.image == settings.trainer_image,
        pull_policy=settings.trainer_pull_policy,
        user=settings.pod_user,
    )
    command: Json = {
        "name": MAIN_CONTAINER,
        "env": [{"name": "HOME", "value": TMP}],
        **({"command": list(gate.command)} if gate.command else {}),
        **({"args": list(gate.args)} if gate.args else {}),
    }
    tracking_uri, registry_uri = settings.servers(spec.tracking)
    variables = {
        "MLFLOW_TRACKING_URI": tracking_uri,
        "MLFLOW_REGISTRY_URI": registry_uri,
        contract.ENV_MODEL_URI: f"models:/{spec.model}/{version}",
        contract.ENV_MODEL_NAME: spec.model,
        contract.ENV_MODEL_VERSION: version,
        contract.ENV_METRICS_PATH: contract.TERMINATION_PATH,
    }
    secret = spec.tracking.secret_ref
    owned: Json = {
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            # NB: a limit of the pod, not of the Job: it counts from the start on a node, so that waiting for a node costs nothing.
            "activeDeadlineSeconds": gate.timeout_seconds or DEFAULT_TIMEOUT_SECONDS,
            "containers": [
                {
                    "name": MAIN_CONTAINER,
                    "env": [{"name": name, "value": value} for name, value in variables.items() if value],
                    "terminationMessagePath": contract.TERMINATION_PATH,
                    **({"envFrom": [{"secretRef": secret.to_json()}]} if secret else {}),
                }
            ],
        }
    }
    gate_settings = PodSettings(env=gate.env, template=gate.template)
    pod = merge_templates(
        defaults,
        {"spec": {"containers": [command]}},
        build_pull_secrets(settings.defaults),
        as_template(settings.defaults.pods.all),
        as_template(gate_settings),
        owned,
    )
    return add_default_requests(pod or {}, MAIN_CONTAINER)
