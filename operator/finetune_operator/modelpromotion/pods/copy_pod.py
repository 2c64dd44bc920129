"""The Job that copies a version from another registry.

The pod has two containers with one folder: `download` has the login of the source alone, and `main` that of the destination alone. So neither
login reaches the other server.
"""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.env import LocalReference
from finetune_crds.modelpromotion import DEFAULT_COPY_TIMEOUT_SECONDS, ModelPromotionSpec, SourceRegistry
from finetune_crds.pods import MAIN_CONTAINER
from finetune_operator import names
from finetune_operator.batch.default_requests import add_default_requests
from finetune_operator.batch.pod_defaults import TMP, build_pod_defaults
from finetune_operator.batch.pod_settings import as_template, build_pull_secrets, merge_templates
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.modelpromotion.pods.job import wrap_pod
from finetune_operator.settings import Settings
from finetune_operator.template_merge import containers, merge
from finetune_operator.text import normalize_address

# Pods after the first one that fail, with the growing pauses of the Job controller.
_RETRIES = 3
# NB: an error that no retry corrects, such as a version that does not exist.
_FAIL_AT_ONCE: Json = {
    "action": "FailJob",
    "onExitCodes": {"operator": "In", "values": [contract.EXIT_RECIPE]},
}
# Beginnings of the variables that `download` does not take over from `main`: the login and the addresses of the destination.
_DESTINATION_VARIABLES = ("MLFLOW_", "DATABRICKS_")
_MOUNT: Json = {"name": contract.COPY_VOLUME, "mountPath": contract.COPY_PATH}


def build_job(
    promotion: Promotion,
    spec: ModelPromotionSpec,
    settings: Settings,
    *,
    source: SourceRegistry,
    version: str,
    identity: str,
    name: str,
) -> Json:
    """Build the Job that copies a version of the source. `job.add_run` adds the MLflow run to which `main` logs the copy.

    Args:
        version: its number.
        identity: its digest, which the copy gets as a tag.
    """
    pod = _build_pod(spec, settings, source, version, identity)
    return wrap_pod(
        promotion,
        pod,
        name=name,
        component=names.COPY,
        version=version,
        retries=_RETRIES,
        failure_rules=[_FAIL_AT_ONCE],
    )


def _build_pod(
    spec: ModelPromotionSpec, settings: Settings, source: SourceRegistry, version: str, identity: str
) -> Json:
    """The pod template: the operator's defaults, the chart's, the spec's, and the fields that the operator owns."""
    defaults = build_pod_defaults(
        MAIN_CONTAINER,
        settings.trainer_image,
        is_product_image=True,
        pull_policy=settings.trainer_pull_policy,
        user=settings.pod_user,
    )
    main = {"name": MAIN_CONTAINER, "env": [{"name": "HOME", "value": TMP}], "volumeMounts": [_MOUNT]}
    volume = {"name": contract.COPY_VOLUME, "emptyDir": {}}
    pod = merge_templates(
        defaults,
        {"spec": {"containers": [main], "volumes": [volume]}},
        build_pull_secrets(settings.defaults),
        as_template(settings.defaults.pods.all),
        source.template,
    )
    pod = add_default_requests(pod or {}, MAIN_CONTAINER)
    # What the templates say of `download` takes precedence over what it has from `main`.
    pod = merge({"spec": {"initContainers": [_derive_download(pod)]}}, pod)
    return dict(merge(pod, _build_owned(spec, settings, source, version, identity)))


def _derive_download(pod: Json) -> Json:
    """The container `download` with the image, the resources and the variables of `main`, without logins."""
    main = next(containers(pod, MAIN_CONTAINER))
    shared = {name: value for name, value in main.items() if name not in ("env", "envFrom")}
    variables = main.get("env") if isinstance(main.get("env"), list) else []
    env = [
        item
        for item in variables or []
        if not (isinstance(item, dict) and str(item.get("name")).startswith(_DESTINATION_VARIABLES))
    ]
    return {**shared, "name": names.DOWNLOAD_CONTAINER, "env": env}


def _build_owned(
    spec: ModelPromotionSpec, settings: Settings, source: SourceRegistry, version: str, identity: str
) -> Json:
    """What only the operator sets."""
    address = normalize_address(source.uri)
    tracking_uri, registry_uri = settings.servers(spec.tracking)
    download = _build_container(
        names.DOWNLOAD_CONTAINER,
        settings,
        source.secret_ref,
        [contract.COPY_FROM, f"models:/{source.model}/{version}"],
        {"MLFLOW_TRACKING_URI": address, "MLFLOW_REGISTRY_URI": address},
    )
    main = _build_container(
        MAIN_CONTAINER,
        settings,
        spec.tracking.secret_ref,
        [
            *(contract.COPY_TO, spec.model),
            *(contract.COPY_ADDRESS, address),
            *(contract.COPY_DIGEST, identity),
        ],
        {"MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_REGISTRY_URI": registry_uri},
    )
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            # NB: a limit of the pod, not of the Job: it counts from the start on a node, so that waiting for a node costs nothing.
            "activeDeadlineSeconds": source.timeout_seconds or DEFAULT_COPY_TIMEOUT_SECONDS,
            "initContainers": [download],
            "containers": [main],
        }
    }


def _build_container(
    name: str, settings: Settings, secret: LocalReference | None, args: list[str], variables: dict[str, str]
) -> Json:
    return {
        "name": name,
        "image": settings.trainer_image,
        "command": [contract.COPY_COMMAND],
        "args": args,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "terminationMessagePath": contract.TERMINATION_PATH,
        **({"envFrom": [{"secretRef": secret.to_json()}]} if secret else {}),
    }
