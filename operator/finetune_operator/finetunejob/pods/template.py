"""Pod templates: defaults, overridden by spec.pods, overridden by the fields that the operator owns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.env import LocalReference
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.training import ModelCache
from finetune_operator import names
from finetune_operator.batch.pod_defaults import GRACE_SECONDS, IGNORE_DISRUPTION, TMP, build_pod_defaults
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import tolerations
from finetune_operator.owners import build_owner_reference
from finetune_operator.template_merge import containers, merge

# Retries after failures that neither the recipe nor the data caused, such as a crash of the JVM or an unreachable MLflow.
_BACKOFF_LIMIT = 2
# With this variable, the Hub's client in a user's script uses the model cache too.
_HUB_IN_CACHE = (
    {"name": "HF_HUB_CACHE", "value": f"{contract.MODEL_CACHE_PATH}/{contract.MODEL_CACHE_HUB}"},
)
# Fields that an init container copies from the main container.
_INIT_CONTAINER_FIELDS = (
    "env",
    "envFrom",
    "volumeMounts",
    "securityContext",
    "imagePullPolicy",
    "terminationMessagePolicy",
)
# Variables such as PATH or PYTHONPATH that are valid for one image only; in a container with another image they can break it.
_IMAGE_SPECIFIC_ENV = re.compile(r"PATH|PYTHON.*|LD_.*")
# Resources that a quota can require for each container.
_QUOTA_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def grace_seconds(user_template: Json | None) -> int:
    """Return the seconds between SIGTERM and SIGKILL."""
    spec = (user_template or {}).get("spec")
    grace_period = spec.get("terminationGracePeriodSeconds") if isinstance(spec, dict) else None
    return grace_period if isinstance(grace_period, int) else GRACE_SECONDS


def labels(ftj: FineTuneJob, component: str | None = None, attempt: int | None = None) -> dict[str, str]:
    """The labels of a child of the job. `component`: None for a child that all components share."""
    job_labels = {
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
        names.LABEL_JOB: ftj.name,
        names.LABEL_UID: ftj.uid,
        **({names.LABEL_COMPONENT: component} if component is not None else {}),
    }
    return job_labels | ({names.LABEL_ATTEMPT: str(attempt)} if attempt is not None else {})


def metadata(ftj: FineTuneJob, name: str, component: str | None = None, attempt: int | None = None) -> Json:
    """Metadata of a child. The job owns the child, which is therefore deleted with the job."""
    return {
        "name": name,
        "namespace": ftj.namespace,
        "labels": labels(ftj, component, attempt),
        "ownerReferences": [build_owner_reference("FineTuneJob", ftj.name, ftj.uid)],
    }


def build_headless_service(ftj: FineTuneJob, name: str, component: str, ports: Mapping[str, int]) -> Json:
    """Build the headless Service that gives the pods of a component their DNS names. `ports`: port numbers by name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(ftj, name, component),
        "spec": {
            "clusterIP": "None",
            # NB: ranks resolve each other's names, and executors connect to the driver, before the pods are ready.
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_UID: ftj.uid, names.LABEL_COMPONENT: component},
            "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in ports.items()],
        },
    }


def pod_template(
    *,
    container: str,
    image: str,
    is_product_image: bool,
    pull_policy: str,
    user: int,
    command: Sequence[str],
    args: Sequence[str],
    secret: LocalReference | None,
    contract_env: Sequence[Json],
    config_map: str,
    model_cache: ModelCache | None,
    pod_labels: dict[str, str],
    subdomain: str | None,
    user_template: Json | None,
    node_lost_seconds: int,
) -> Json:
    """The pod template of one component.

    Args:
        container: name of its main container.
        is_product_image: whether the image is one of the product's images, which run with a read-only root filesystem.
        user: user and group id of the product's images; 0 to set none.
        secret: Secret whose keys also become variables.
        contract_env: variables that override the user's variables.
        config_map: the ConfigMap with the recipe.
        model_cache: the claim with downloaded models.
        subdomain: name of the headless Service that gives the pods their domain.
        user_template: the merged template of the role in spec.pods, in which the container `main` is the main container.
        node_lost_seconds: how long the pod waits for a node that is not ready.
    """
    # NB: from the lowest to the highest precedence: the defaults, `settings`, the user's template, `owned_fields`.
    defaults = build_pod_defaults(
        container, image, is_product_image=is_product_image, pull_policy=pull_policy, user=user
    )
    settings: Json = {
        "env": [{"name": "HOME", "value": TMP}, *(_HUB_IN_CACHE if model_cache else ())],
        "envFrom": [],
        **({"command": list(command)} if command else {}),
        **({"args": list(args)} if args else {}),
    }
    volumes, mounts = _cached_models(model_cache) if model_cache else ([], [])
    owned_container: Json = {
        "name": container,
        "env": list(contract_env),
        **({"envFrom": [{"secretRef": secret.to_json()}]} if secret else {}),
        "volumeMounts": [
            {"name": contract.RECIPE_VOLUME, "mountPath": contract.RECIPE_DIRECTORY, "readOnly": True},
            *mounts,
        ],
    }
    owned_fields: Json = {
        "metadata": {"labels": pod_labels},
        "spec": {
            "restartPolicy": "Never",
            "containers": [owned_container],
            "volumes": [{"name": contract.RECIPE_VOLUME, "configMap": {"name": config_map}}, *volumes],
            **({"subdomain": subdomain} if subdomain else {}),
        },
    }
    with_settings = merge(defaults, {"spec": {"containers": [{"name": container, **settings}]}})
    with_user_template = merge(with_settings, _with_container_name(user_template or {}, container))
    pod = dict(merge(with_user_template, owned_fields))
    return tolerations.limit_wait_for_node(pod, node_lost_seconds)


def _with_container_name(user_template: Json, name: str) -> Json:
    """Return the template with `name` instead of `main`. NB: the API server has not validated the template: parts can have any type."""
    spec = user_template.get("spec")
    user_containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(user_containers, list):
        return user_template
    renamed_containers = [
        {**item, "name": name} if isinstance(item, dict) and item.get("name") == MAIN_CONTAINER else item
        for item in user_containers
    ]
    return {**user_template, "spec": {**spec, "containers": renamed_containers}}


def _cached_models(cache: ModelCache) -> tuple[list[Json], list[Json]]:
    """The volumes with downloaded models, and their mounts: one of each."""
    name = "model-cache"
    volume = {"name": name, "persistentVolumeClaim": {"claimName": cache.claim_name}}
    return [volume], [{"name": name, "mountPath": contract.MODEL_CACHE_PATH}]


def init_container_fields(pod: Json, container: str, *, is_product_image: bool) -> Json:
    """Return the fields that an init container of the operator copies from the main container to reach the same storage and servers.

    The init container gets no devices. It keeps the requests and limits of CPU, memory and ephemeral storage, because a quota can
    require them for each container.

    Args:
        is_product_image: whether the init container runs a product image: variables that are valid for the main image only are left out.
    """
    main = next(containers(pod, container), {})
    copied_fields = {field: main[field] for field in _INIT_CONTAINER_FIELDS if field in main}
    if is_product_image and "env" in copied_fields:
        copied_fields["env"] = [item for item in copied_fields["env"] if not _is_image_specific(item)]
    resources = _without_devices(main.get("resources"))
    return copied_fields | ({"resources": resources} if resources else {})


def _is_image_specific(variable: Any) -> bool:
    # NB: the API server has not validated the variables yet, and will reject one without a name.
    name = variable.get("name") if isinstance(variable, dict) else None
    return isinstance(name, str) and _IMAGE_SPECIFIC_ENV.fullmatch(name) is not None


def _without_devices(resources: Any) -> Json:
    requests_and_limits = resources if isinstance(resources, dict) else {}
    parts = {
        name: requests_and_limits[name]
        for name in ("limits", "requests")
        if isinstance(requests_and_limits.get(name), dict)
    }
    without_devices = {
        name: {key: value for key, value in part.items() if key in _QUOTA_RESOURCES}
        for name, part in parts.items()
    }
    return {name: part for name, part in without_devices.items() if part}


def retried_job(job_metadata: Json, pod: Json, *container_names: str) -> Json:
    """Build a Job of one pod that retries, unless one of the named containers reports that the recipe or the data is wrong.

    An evicted or preempted pod does not use up a retry.
    """
    codes = [contract.EXIT_RECIPE, contract.EXIT_DATA]
    fail_permanently: list[Json] = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": container, "operator": "In", "values": codes},
        }
        for container in container_names
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata,
        "spec": {
            "backoffLimit": _BACKOFF_LIMIT,
            "podFailurePolicy": {"rules": [IGNORE_DISRUPTION, *fail_permanently]},
            "template": pod,
        },
    }
