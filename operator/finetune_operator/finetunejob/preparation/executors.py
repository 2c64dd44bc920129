"""Spark executors in pods of their own (data.prepare.spark.mode Kubernetes or SparkApplication): their pods and their state.

Spark's driver creates the executors itself, in the job's namespace; the driver's pod owns them. The operator gives the driver a pod
template, and a ServiceAccount that may create pods. With mode Kubernetes, in which the driver runs in the prep pod, the operator also
creates a Service by which executors find the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import RESERVED_ENV
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.prepare import Prepare
from finetune_crds.source import Source
from finetune_crds.spark import Spark
from finetune_operator import names
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import health, pod_state, template
from finetune_operator.template_merge import LOST_WITH_POD, is_below, mounts

# Fields of the prep container that apply only to the driver.
_DRIVER_FIELDS = frozenset(
    {"args", "resources", "ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle"}
)
# The containers of drivers: in the prep pod, and in a pod that spark-submit creates.
_DRIVERS = (names.PREP_CONTAINER, contract.APPLICATION_DRIVER_CONTAINER)
# How long a driver takes to create its executors.
_CREATION_TIMEOUT = timedelta(seconds=20)
# Spark numbers executors from 1, and replaces each that ends. After more replacements than this, the job reports that no executor runs.
_MAX_REPLACED = 5
# Linux limits a variable to 128 KiB (MAX_ARG_STRLEN). The rest is for what the operator adds to a template.
_MAX_TEMPLATE_BYTES = 100_000


def count_executors(spec: FineTuneJobSpec) -> int:
    """Return the number of executor pods; 0 if Spark runs without executors."""
    return spec.prepare.spark.executor_pods if spec.prepare else 0


def find_driver_account(spec: FineTuneJobSpec) -> str:
    """The ServiceAccount of the driver."""
    pod_spec = (spec.pods.prepare.template or {}).get("spec")
    account_name = pod_spec.get("serviceAccountName") if isinstance(pod_spec, dict) else None
    return account_name if isinstance(account_name, str) and account_name else names.SPARK_ACCOUNT


def build_service(ftj: FineTuneJob) -> Json:
    """The headless Service by whose name executors find the driver."""
    ports = {"driver": contract.SPARK_DRIVER_PORT, "blocks": contract.SPARK_BLOCKS_PORT}
    return template.build_headless_service(ftj, names.prep_name(ftj.name), names.PREP, ports)


def build_submitted_driver_env(ftj: FineTuneJob) -> list[Json]:
    """The variables of a driver whose pod spark-submit creates; spark-submit sets the others."""
    values = {contract.ENV_POD_NAMESPACE: ftj.namespace, contract.ENV_EXECUTOR_SELECTOR: build_selector(ftj)}
    return [{"name": name, "value": value} for name, value in values.items()]


def build_driver_env(ftj: FineTuneJob, executor: Json) -> list[Json]:
    """Return the variables with the settings of a driver in the prep pod and of its executors.

    Args:
        executor: the pod of an executor.
    """
    values = {
        contract.ENV_DRIVER_HOST: f"{names.prep_name(ftj.name)}.{ftj.namespace}.svc",
        contract.ENV_EXECUTOR_TEMPLATE: _as_value(executor),
    }
    pod_name = {"name": contract.ENV_POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return [
        pod_name,
        *build_submitted_driver_env(ftj),
        *({"name": name, "value": value} for name, value in values.items()),
    ]


def _as_value(body: Json) -> str:
    """JSON as the value of a variable. NB: the kubelet expands $(NAME) in a value, and takes $$ for a dollar."""
    return json.dumps(body, separators=(",", ":")).replace("$", "$$")


def build_selector(ftj: FineTuneJob) -> str:
    """The label selector of a job's executors."""
    return f"{names.LABEL_UID}={ftj.uid},{names.LABEL_COMPONENT}={names.EXECUTOR}"


def as_driver(pod: Json, spec: FineTuneJobSpec) -> Json:
    """The prep pod with the API token of an account that may create pods. No other pod of a job has an API token."""
    allowed = {"serviceAccountName": find_driver_account(spec), "automountServiceAccountToken": True}
    return {**pod, "spec": {**pod["spec"], **allowed}}


def as_executor(ftj: FineTuneJob, pod: Json, spec: FineTuneJobSpec) -> Json:
    """The pod of an executor: the prep pod without the fields of the driver. Spark adds the rest.

    The pod keeps the user's variables, Secrets and volumes, since executors read the source and write the output.
    """
    meta, pod_spec = pod.get("metadata", {}), pod["spec"]
    labels = {**meta.get("labels", {}), **template.labels(ftj, names.EXECUTOR)}
    volumes = [item for item in pod_spec["volumes"] if _name(item) != contract.RECIPE_VOLUME]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "labels": labels},
        "spec": {
            **pod_spec,
            "serviceAccountName": find_driver_account(spec),
            "automountServiceAccountToken": False,
            "volumes": volumes,
            "containers": [
                _as_executor_container(item) if _name(item) == names.PREP_CONTAINER else item
                for item in pod_spec["containers"]
            ],
        },
    }


def _as_executor_container(prep_container: Json) -> Json:
    executor_fields = {name: value for name, value in prep_container.items() if name not in _DRIVER_FIELDS}
    executor_mounts = [
        item for item in prep_container["volumeMounts"] if _name(item) != contract.RECIPE_VOLUME
    ]
    return {
        **executor_fields,
        "name": contract.EXECUTOR_CONTAINER,
        "command": [contract.EXECUTOR_COMMAND],
        "env": [item for item in prep_container["env"] if _name(item) not in RESERVED_ENV],
        "volumeMounts": executor_mounts,
    }


def _name(item: object) -> object:
    """The name of an item of a list. NB: the API server has not validated what users write."""
    return item.get("name") if isinstance(item, dict) else None


def build_trial_pod(executor: Json, ftj: FineTuneJob) -> Json:
    """An executor's pod for a dry run, about as large as Spark's: a quota counts its memory and cores."""
    spark = ftj.spec.prepare.spark if ftj.spec and ftj.spec.prepare else Spark()
    amounts = {"cpu": str(spark.cores_of_executor), "memory": spark.memory_of_executor}
    resources = {"requests": amounts, "limits": {"memory": amounts["memory"]}}
    trial_containers = [
        {**item, "resources": resources} if _name(item) == contract.EXECUTOR_CONTAINER else item
        for item in executor["spec"]["containers"]
    ]
    meta = {
        **executor["metadata"],
        "namespace": ftj.namespace,
        "name": f"{names.prep_name(ftj.name)}-executor",
    }
    return {
        **executor,
        "metadata": meta,
        "spec": {**executor["spec"], "restartPolicy": "Never", "containers": trial_containers},
    }


def build_access_review(ftj: FineTuneJob, spec: FineTuneJobSpec) -> Json:
    """A review of whether the driver's account may create pods. The API server answers in the status of the review."""
    group = "system:serviceaccounts"
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "LocalSubjectAccessReview",
        # NB: a review has no name.
        "metadata": {"namespace": ftj.namespace},
        "spec": {
            "user": f"system:serviceaccount:{ftj.namespace}:{find_driver_account(spec)}",
            "groups": [group, f"{group}:{ftj.namespace}", "system:authenticated"],
            "resourceAttributes": {"namespace": ftj.namespace, "verb": "create", "resource": "pods"},
        },
    }


def find_unshared_folders(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake for each source or output folder outside the volumes that all pods mount."""
    data, prepare = spec.data, spec.prepare
    if data is None or prepare is None or not count_executors(spec):
        return
    shared_mounts = mounts(spec.pods.prepare.template, MAIN_CONTAINER, but=LOST_WITH_POD)
    folders = {
        **_list_folders(data.source),
        **_list_evaluation_sets(prepare),
        "data.prepare.output": prepare.output,
    }
    for field, path in folders.items():
        if path and path.startswith("/") and not any(is_below(path, mount) for mount in shared_mounts):
            yield (
                f"{field} {path} is not on a volume that the driver and its executors share: mount a PersistentVolumeClaim there in the "
                "container main of spec.pods.prepare.template, or create a FineTuneJob with another name and s3://bucket/folder"
            )


def find_oversized_template(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake if the pod template is too long for the driver's variable that contains it."""
    if not count_executors(spec):
        return
    size = len(_as_value(spec.pods.prepare.template or {}))
    if size > _MAX_TEMPLATE_BYTES:
        yield (
            f"env, envFrom and template of spec.pods.prepare have {size:,} bytes, but executors can receive at most "
            f"{_MAX_TEMPLATE_BYTES:,}: move long values into a ConfigMap or a Secret that envFrom names"
        )


def _list_folders(source: Source | None) -> dict[str, str | None]:
    """The path of each source, by its field."""
    return {f"{field}.path": table.path for field, table in source.tables} if source else {}


def _list_evaluation_sets(prepare: Prepare) -> dict[str, str | None]:
    """The path of each evaluation set with which no example may share text, by the field of the path."""
    sources = prepare.decontaminate.sources if prepare.decontaminate else []
    return {f"data.prepare.decontaminate.sources[{part.name}].path": part.path for part in sources}


def select_executors(executor_pods: Sequence[Json], drivers: Sequence[Json]) -> list[Json]:
    """The executors that these drivers' pods control. Labels only find candidates, since any user can write them."""
    uids = {pod["metadata"]["uid"] for pod in drivers}
    return [pod for pod in executor_pods if children.controlling_pod(pod) in uids]


class MissingExecutors(NamedTuple):
    """The number of missing executors, and of desired executors."""

    missing: int
    desired: int


def count_missing(
    ftj: FineTuneJob, drivers: Sequence[Json], executor_pods: Sequence[Json], now: datetime
) -> MissingExecutors | None:
    """Count the missing executors; None if all exist, if Spark chooses their number, or if no driver has run for long enough."""
    prepare = ftj.spec.prepare if ftj.spec else None
    since = max((start for pod in drivers if (start := _running_since(pod))), default=None)
    if prepare is None or since is None or now - since < _CREATION_TIMEOUT:
        return None
    if prepare.spark.is_dynamic:
        return None
    missing = prepare.spark.executor_pods - len(pod_state.alive(executor_pods))
    return MissingExecutors(missing, prepare.spark.executor_pods) if missing > 0 else None


def _running_since(pod: Json) -> datetime | None:
    for item in pod.get("status", {}).get("containerStatuses") or []:
        started = (item.get("state", {}).get("running") or {}).get("startedAt")
        if item["name"] in _DRIVERS and started:
            return datetime.fromisoformat(started)
    return None


def report_executors(draft: Draft, drivers: Sequence[Json]) -> None:
    """Report in a condition what keeps driver and executors from running.

    Args:
        drivers: the pod of the driver, if it has not ended.
    """
    alive = [*drivers, *pod_state.alive(draft.observed.executors)]
    name = names.prep_name(draft.ftj.name)
    blockage = health.find_blockage(draft, alive, name, desired=1 + count_executors(draft.spec))
    health.report_blockage(draft, alive, blockage)
    report_crash_loop(draft)


def report_crash_loop(draft: Draft) -> None:
    """Report in a condition that executors end one after the other, if nothing else keeps pods from running."""
    crash_loop = find_crash_loop(draft.observed.executors, count_executors(draft.spec))
    if crash_loop and draft.holds(ConditionType.PODS_HEALTHY):
        draft.set(ConditionType.PODS_HEALTHY, False, ConditionReason.EXECUTORS_FAIL, crash_loop)


def describe_progress(draft: Draft) -> str:
    """Describe the pods that Spark runs on, as a part of a sentence."""
    desired, alive = count_executors(draft.spec), pod_state.alive(draft.observed.executors)
    return (
        f"Spark is running on {pod_state.count_ready(alive)} of {desired} executors"
        if desired
        else "Spark is running"
    )


def find_crash_loop(executor_pods: Sequence[Json], desired: int) -> str | None:
    """A sentence about executors that end one after the other before they run; None if they do not.

    Args:
        desired: the number of executors that should run.
    """
    newest = max((_executor_number(pod) for pod in executor_pods), default=0)
    if pod_state.count_ready(executor_pods) or newest <= desired + _MAX_REPLACED:
        return None
    return (
        f"Spark has created {newest} executors for {desired}, and none runs: executors exit soon after they start; check the image of "
        f"spec.pods.prepare, and whether a NetworkPolicy blocks the driver's ports {contract.SPARK_DRIVER_PORT} and "
        f"{contract.SPARK_BLOCKS_PORT}"
    )


def _executor_number(pod: Json) -> int:
    """The number at the end of an executor's name; 0 without one."""
    _, _, number = pod["metadata"]["name"].rpartition("-")
    return int(number) if number.isdecimal() else 0
