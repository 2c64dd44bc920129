"""Spark on Kubernetes (data.prepare.spark.mode Kubernetes): the driver in the prep pod, executors in pods that it creates."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_crds import contract
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune_crds.spark import Spark

API_SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_SECONDS = 30
# Settings that the recipe's conf may not have, with the field of the FineTuneJob that determines each.
FIELDS = {
    "spark.executor.instances": "data.prepare.spark.executors",
    "spark.executor.cores": "data.prepare.spark.executorCores",
    "spark.executor.memory": "data.prepare.spark.executorMemory",
    "spark.kubernetes.container.image": "pods.prepare.image",
    "spark.kubernetes.executor.container.image": "pods.prepare.image",
    "spark.kubernetes.executor.podTemplateFile": "pods.prepare.template",
    "spark.kubernetes.authenticate.driver.serviceAccountName": "pods.prepare.serviceAccountName",
    "spark.kubernetes.authenticate.executor.serviceAccountName": "pods.prepare.serviceAccountName",
}
# Settings that follow from where the driver runs. A session with other settings would not find its executors.
FIXED = (
    "spark.driver.host",
    "spark.driver.bindAddress",
    "spark.driver.port",
    "spark.driver.blockManager.port",
    "spark.blockManager.port",
    "spark.authenticate",
    "spark.kubernetes.namespace",
    "spark.kubernetes.driver.pod.name",
    "spark.kubernetes.executor.podNamePrefix",
    "spark.kubernetes.executor.podTemplateContainerName",
    "spark.kubernetes.executor.disableConfigMap",
)
_DYNAMIC = "spark.dynamicAllocation."


@dataclass(frozen=True)
class Driver:
    """The prep pod as Spark's driver.

    host: name at which executors find it.
    selector: labels of the executors.
    template: pod template of the executors, as JSON.
    image, pull_policy: the executor's, from the template.
    """

    pod: str
    namespace: str
    host: str
    selector: str
    template: str
    image: str
    pull_policy: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Driver:
        """Return the driver that the operator describes in environment variables.

        Raises:
            RecipeRefusedError: the operator did not create this pod.
        """
        try:
            template = environment[contract.ENV_EXECUTOR_TEMPLATE]
            containers = json.loads(template)["spec"]["containers"]
            executor = {item["name"]: item for item in containers}[contract.EXECUTOR_CONTAINER]
            return cls(
                pod=environment[contract.ENV_POD_NAME],
                namespace=environment[contract.ENV_POD_NAMESPACE],
                host=environment[contract.ENV_DRIVER_HOST],
                selector=environment[contract.ENV_EXECUTOR_SELECTOR],
                template=template,
                image=executor["image"],
                pull_policy=executor["imagePullPolicy"],
            )
        except KeyError as error:
            raise RecipeRefusedError(
                f"data.prepare.spark.mode Kubernetes requires a pod that the operator created, and {error} is not "
                "set: use mode Local"
            ) from error

    def write_template(self, scratch: Path) -> None:
        """Write the pod template of the executors to the file that Spark reads. Only this user can read it."""
        file = scratch / contract.EXECUTOR_TEMPLATE_FILE
        file.touch(mode=0o600)
        # NB: `touch` does not change the mode of a file that exists.
        file.chmod(0o600)
        file.write_text(self.template, encoding="utf-8")


def build_settings(
    spark: Spark, driver: Driver, *, jars: Path, scratch: Path, options: str, memory: str
) -> dict[str, str]:
    """Return Spark's settings for this mode, in addition to the settings of every mode.

    Args:
        options: options of the JVM.
        memory: heap of an executor, as the JVM reads it.

    Raises:
        RecipeRefusedError: the conf sets a setting that has a field, or that the driver's location determines.
    """
    return build_executor_settings(spark, jars=jars, options=options) | {
        "spark.master": f"k8s://{API_SERVER}",
        "spark.driver.host": driver.host,
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.driver.port": str(contract.SPARK_DRIVER_PORT),
        "spark.driver.blockManager.port": str(contract.SPARK_BLOCKS_PORT),
        "spark.local.dir": str(scratch / "spark"),
        "spark.executor.cores": str(spark.cores_of_executor),
        "spark.executor.memory": memory,
        # Spark's factor for Python programs, whose workers use memory outside of the heap.
        "spark.executor.memoryOverheadFactor": "0.4",
        "spark.kubernetes.namespace": driver.namespace,
        "spark.kubernetes.driver.pod.name": driver.pod,
        "spark.kubernetes.executor.podNamePrefix": driver.pod,
        "spark.kubernetes.container.image": driver.image,
        "spark.kubernetes.container.image.pullPolicy": driver.pull_policy,
        "spark.kubernetes.executor.podTemplateFile": str(scratch / contract.EXECUTOR_TEMPLATE_FILE),
        "spark.kubernetes.executor.podTemplateContainerName": contract.EXECUTOR_CONTAINER,
    }


def build_executor_settings(spark: Spark, *, jars: Path, options: str) -> dict[str, str]:
    """Return Spark's settings for executors in pods, in every mode with such executors.

    Args:
        options: options of the JVM.

    Raises:
        RecipeRefusedError: the conf sets a setting that has a field, or that the driver's location determines.
    """
    _check_conf(spark)
    number = str(spark.executor_pods)
    dynamic = {f"{_DYNAMIC}minExecutors": "1", f"{_DYNAMIC}maxExecutors": number}
    return {
        # Without authentication, any pod that reaches the driver could be one of its executors.
        "spark.authenticate": "true",
        "spark.blockManager.port": str(contract.SPARK_BLOCKS_PORT),
        **(dynamic if spark.is_dynamic else {"spark.executor.instances": number}),
        "spark.executor.extraClassPath": f"{jars}/*",
        "spark.executor.extraJavaOptions": options,
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",
        # NB: a pod that a quota rejects counts as a failed executor. So Spark retries without limit; the operator reports the rejection.
        "spark.executor.maxNumFailures": str(2**31 - 1),
        # With the settings below, Spark manages only pods, and its ServiceAccount needs no other rights.
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }


def _check_conf(spark: Spark) -> None:
    for name, field in FIELDS.items():
        if name in spark.conf:
            raise RecipeRefusedError(f"data.prepare.spark.conf cannot set {name}: use {field}")
    fixed = [name for name in FIXED if name in spark.conf]
    if fixed:
        raise RecipeRefusedError(
            f"data.prepare.spark.conf cannot set {', '.join(fixed)}: the operator sets it for the driver pod; remove "
            "it"
        )


def delete_executors(
    namespace: str, selector: str, account: Path = ACCOUNT, server: str = API_SERVER
) -> None:
    """Delete the executors of an earlier driver of this job: they may stay pending forever and take part of a quota.

    Args:
        selector: the labels of the executors.

    Raises:
        TrainingError: the API server refuses, or cannot be reached.
    """
    query = urllib.parse.urlencode({"labelSelector": selector})
    url = f"{server}/api/v1/namespaces/{urllib.parse.quote(namespace)}/pods?{query}"
    token = (account / "token").read_text(encoding="utf-8").strip()
    request = urllib.request.Request(  # noqa: S310 - the API server's address
        url, method="DELETE", headers={"Authorization": f"Bearer {token}", "Accept": "application/json"}
    )
    tls_context = ssl.create_default_context(cafile=os.fspath(account / "ca.crt"))
    # NB: no proxy: the one in the pod's environment variables is for servers outside the cluster.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls_context)
    )
    try:
        opener.open(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError as error:
        raise TrainingError(
            "ExecutorsForbidden",
            f"the API server refuses the driver's ServiceAccount: {_read_message(error)}: bind it to a Role with the verbs that "
            "docs/finetunejob/data-spark.md lists",
        ) from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise TrainingError("ApiServerUnreachable", f"{server} cannot be reached: {error}") from error


def _read_message(error: urllib.error.HTTPError) -> str:
    try:
        body: Any = json.loads(error.read())
        return str(body["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
