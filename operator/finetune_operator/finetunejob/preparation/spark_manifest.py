"""The SparkApplication of a preparation (data.prepare.spark.mode SparkApplication).

Driver and executors are the pods of mode Kubernetes, as pod templates that spark-submit completes. The template of the driver names the
job as the owner, since the spark-operator sets an owner only if its webhook may change the pod.
"""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds import API_VERSION, contract
from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.quantity import jvm_memory
from finetune_operator import names
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import template
from finetune_operator.finetunejob.preparation import executors
from finetune_operator.template_merge import containers

_API = "sparkoperator.k8s.io/v1beta2"
# The same as in mode Kubernetes: Python's processes use memory outside the heap.
_OVERHEAD = "0.4"
# Resources that spark-submit sets.
_BY_SPARK = ("cpu", "memory")


def find_mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake if a pod template sets the driver's memory, which spark-submit overrides."""
    for container in containers(spec.pods.prepare.template, MAIN_CONTAINER):
        if any("memory" in amounts for amounts in _amounts(container).values()):
            yield (
                "spec.pods.prepare.template sets the memory of the container main, but with data.prepare.spark.mode SparkApplication the "
                "driver gets driverMemory plus 40%: remove the memory from the template"
            )


def build_manifest(
    ftj: FineTuneJob, spec: FineTuneJobSpec, name: str, *, driver: Json, executor: Json
) -> Json:
    """The SparkApplication of one attempt.

    Args:
        driver: the pod template of the prep pod.
        executor: the pod of an executor.

    Raises:
        ValueError: the job has nothing to prepare.
    """
    if spec.prepare is None:
        raise ValueError(f"{ftj.key} has nothing to prepare")
    spark = spec.prepare.spark
    main = next(item for item in driver["spec"]["containers"] if item["name"] == names.PREP_CONTAINER)
    return {
        "apiVersion": _API,
        "kind": "SparkApplication",
        "metadata": _metadata(ftj, spec, name),
        "spec": {
            "type": "Python",
            "mode": "cluster",
            "sparkVersion": contract.SPARK_VERSION,
            "image": main["image"],
            "imagePullPolicy": main["imagePullPolicy"],
            "mainApplicationFile": f"local://{contract.DRIVER_FILE}",
            # Instead of a rerun, the operator creates another SparkApplication with another name: old pods may block a rerun.
            "restartPolicy": {"type": "Never"},
            "memoryOverheadFactor": _OVERHEAD,
            **({"sparkConf": dict(spark.conf)} if spark.conf else {}),
            "driver": {
                "podName": names.driver_name(name),
                "memory": jvm_memory(spark.driver_memory),
                "serviceAccount": executors.find_driver_account(spec),
                **_cores(main),
                "template": _driver_template(ftj, driver),
            },
            "executor": {
                **({} if spark.is_dynamic else {"instances": spark.executor_pods}),
                "cores": spark.cores_of_executor,
                "memory": jvm_memory(spark.memory_of_executor),
                # NB: the spark-operator gives all pods the labels of the SparkApplication, unless this field gives a label another value.
                "labels": {names.LABEL_COMPONENT: names.EXECUTOR},
                "template": _executor_template(executor),
            },
        },
    }


def _metadata(ftj: FineTuneJob, spec: FineTuneJobSpec, name: str) -> Json:
    metadata = template.metadata(ftj, name, names.PREP)
    queue = spec.run_policy.queue_name
    if queue:
        metadata["labels"][names.LABEL_QUEUE] = queue
    return metadata


def _cores(container: Json) -> Json:
    """The CPU request and limit of the driver's container, if the template sets any: the default of spark-submit is one core."""
    amounts = _amounts(container)
    fields = {"coreRequest": "requests", "coreLimit": "limits"}
    return {field: str(amounts[kind]["cpu"]) for field, kind in fields.items() if "cpu" in amounts[kind]}


def _amounts(container: Json) -> dict[str, Json]:
    """The amounts of a container by resource, for each of `requests` and `limits`. NB: the API server has not validated them."""
    resources = container.get("resources")
    if not isinstance(resources, dict):
        return {"requests": {}, "limits": {}}
    amounts_by_kind = {kind: resources.get(kind) for kind in ("requests", "limits")}
    return {kind: amounts if isinstance(amounts, dict) else {} for kind, amounts in amounts_by_kind.items()}


def _driver_template(ftj: FineTuneJob, pod: Json) -> Json:
    owner = {
        "apiVersion": API_VERSION,
        "kind": "FineTuneJob",
        "name": ftj.name,
        "uid": ftj.uid,
        "controller": True,
    }
    pod_template = _rename_container(pod, names.PREP_CONTAINER, contract.APPLICATION_DRIVER_CONTAINER)
    return {**pod_template, "metadata": {**pod_template["metadata"], "ownerReferences": [owner]}}


def _executor_template(pod: Json) -> Json:
    return _rename_container(pod, contract.EXECUTOR_CONTAINER, contract.APPLICATION_EXECUTOR_CONTAINER)


def _rename_container(pod: Json, name: str, new_name: str) -> Json:
    """The template, with the name that spark-submit expects for the main container, and with only labels and annotations as metadata."""
    meta = {key: value for key, value in pod["metadata"].items() if key in ("labels", "annotations")}
    return {
        "metadata": meta,
        "spec": {
            **pod["spec"],
            "containers": [
                _strip_submit_fields(item, new_name) if item.get("name") == name else item
                for item in pod["spec"]["containers"]
            ],
        },
    }


def _strip_submit_fields(container: Json, name: str) -> Json:
    """The container with another name, without what spark-submit writes (arguments, cores, memory); for a driver, with DRIVER_COMMAND."""
    fields = {key: value for key, value in container.items() if key not in ("args", "resources")}
    other_amounts = {
        kind: {key: value for key, value in amounts.items() if key not in _BY_SPARK}
        for kind, amounts in _amounts(container).items()
    }
    resources = {kind: amounts for kind, amounts in other_amounts.items() if amounts}
    command = {"command": [contract.DRIVER_COMMAND]} if name == contract.APPLICATION_DRIVER_CONTAINER else {}
    return {**fields, "name": name, **command, **({"resources": resources} if resources else {})}
