"""Spark's settings where executors are pods, and what the driver asks of the API server before."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import certifi
import pytest

from finetune_crds.spark import Spark
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from finetune_trainer.prep.spark import kubernetes, session
from support.http_server import Answer, Request, serving

TEMPLATE = json.dumps(
    {
        "spec": {
            "containers": [
                {"name": "sidecar"},
                {"name": "executor", "image": "prep:1", "imagePullPolicy": "Never"},
            ]
        }
    }
)
DRIVER = kubernetes.Driver(
    pod="tune-prep-abcde",
    namespace="team",
    host="tune-prep.team.svc",
    selector="finetune.dev/component=prep-executor",
    template=TEMPLATE,
    image="prep:1",
    pull_policy="Never",
)
ENVIRONMENT = {
    "FINETUNE_POD_NAME": "tune-prep-abcde",
    "FINETUNE_POD_NAMESPACE": "team",
    "FINETUNE_DRIVER_HOST": "tune-prep.team.svc",
    "FINETUNE_EXECUTOR_SELECTOR": "finetune.dev/component=prep-executor",
    "FINETUNE_EXECUTOR_TEMPLATE": TEMPLATE,
}


def settings(**spark: Any) -> dict[str, str]:
    return session.build_settings(
        Spark.model_validate({"mode": "Kubernetes", **spark}),
        jars=Path("/jars"),
        scratch=Path("/tmp"),
        cores=2,
        environment={},
        driver=DRIVER,
    )


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a pod's ServiceAccount."""
    (tmp_path / "token").write_text("the-token\n", encoding="utf-8")
    (tmp_path / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    return tmp_path


def test_executors_of_an_earlier_driver_are_deleted(account: Path) -> None:
    requests: list[tuple[str, str, str | None]] = []

    def answer(request: Request) -> Answer:
        requests.append((request.method, request.target, request.headers["Authorization"]))
        return Answer(200, {})

    with serving(answer) as server:
        kubernetes.delete_executors(DRIVER.namespace, DRIVER.selector, account, server)
    selector = "labelSelector=finetune.dev%2Fcomponent%3Dprep-executor"
    assert requests == [("DELETE", f"/api/v1/namespaces/team/pods?{selector}", "Bearer the-token")]


def test_an_account_that_may_not_delete_pods_is_named(account: Path) -> None:
    body = {"message": 'pods is forbidden: User "system:serviceaccount:team:spark" cannot delete'}
    with (
        serving(lambda _: Answer(403, body)) as server,
        pytest.raises(TrainingError) as failed,
    ):
        kubernetes.delete_executors(DRIVER.namespace, DRIVER.selector, account, server)
    assert (failed.value.reason, failed.value.message) == (
        "ExecutorsForbidden",
        f"the API server refuses the driver's ServiceAccount: {body['message']}: bind it to a Role with the verbs that "
        "docs/finetunejob/data-spark.md lists",
    )


def test_settings_follow_from_the_drivers_pod() -> None:
    local = session.build_settings(
        Spark(), jars=Path("/jars"), scratch=Path("/tmp"), cores=2, environment={}, driver=None
    )
    spark_settings = settings()
    # The work is not in the driver's JVM.
    options = local["spark.driver.extraJavaOptions"].removesuffix(
        " -Dfinetune.log.tasks=off -XX:+UseSerialGC"
    )
    assert {name: value for name, value in spark_settings.items() if local.get(name) != value} == {
        "spark.master": "k8s://https://kubernetes.default.svc",
        "spark.driver.host": "tune-prep.team.svc",
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.driver.port": "7078",
        "spark.driver.blockManager.port": "7079",
        "spark.blockManager.port": "7079",
        "spark.authenticate": "true",
        "spark.local.dir": "/tmp/spark",
        "spark.executor.instances": "2",
        "spark.executor.cores": "1",
        "spark.executor.memory": "2097152k",
        "spark.executor.memoryOverheadFactor": "0.4",
        "spark.executor.extraClassPath": "/jars/*",
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": options,
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",
        "spark.executor.maxNumFailures": "2147483647",
        "spark.kubernetes.namespace": "team",
        "spark.kubernetes.driver.pod.name": "tune-prep-abcde",
        "spark.kubernetes.executor.podNamePrefix": "tune-prep-abcde",
        "spark.kubernetes.container.image": "prep:1",
        "spark.kubernetes.container.image.pullPolicy": "Never",
        "spark.kubernetes.executor.podTemplateFile": "/tmp/executor.yaml",
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }


def test_amounts_are_those_of_the_recipe() -> None:
    spark_settings = settings(executors=7, executorCores=4, executorMemory="8Gi")
    names = ("instances", "cores", "memory")
    assert [spark_settings[f"spark.executor.{name}"] for name in names] == ["7", "4", "8388608k"]


def test_dynamic_allocation_has_the_executors_as_its_most() -> None:
    spark_settings = settings(executors=7, conf={"spark.dynamicAllocation.enabled": "true"})
    assert "spark.executor.instances" not in spark_settings
    bounds = [spark_settings[f"spark.dynamicAllocation.{name}Executors"] for name in ("min", "max")]
    assert bounds == ["1", "7"]


CONF: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "room for Python": ({"spark.executor.memoryOverheadFactor": "1"},) * 2,
    "a limit of cores": ({"spark.kubernetes.executor.limit.cores": "2"},) * 2,
}


@pytest.mark.parametrize(("conf", "expected"), CONF.values(), ids=CONF)
def test_conf_of_the_recipe(conf: dict[str, str], expected: dict[str, str]) -> None:
    ours, theirs = settings(), settings(conf=conf)
    assert {name: value for name, value in theirs.items() if ours.get(name) != value} == expected


@pytest.mark.parametrize(("name", "field"), kubernetes.FIELDS.items())
def test_conf_may_not_set_what_has_a_field(name: str, field: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        settings(conf={name: "x"})
    assert refused.value.message == f"data.prepare.spark.conf cannot set {name}: use {field}"


@pytest.mark.parametrize("name", kubernetes.FIXED)
def test_conf_may_not_set_what_follows_from_the_pod(name: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        settings(conf={name: "x"})
    assert refused.value.message == (
        f"data.prepare.spark.conf cannot set {name}: the operator sets it for the driver pod; remove it"
    )


def test_the_driver_is_what_the_operator_says() -> None:
    assert kubernetes.Driver.of(ENVIRONMENT) == DRIVER


def test_the_template_of_executors_is_a_file_of_the_driver_alone(tmp_path: Path) -> None:
    # A second session of the same pod writes it again.
    (tmp_path / "executor.yaml").touch(mode=0o644)
    DRIVER.write_template(tmp_path)
    [file] = tmp_path.iterdir()
    assert (file.name, file.read_text(encoding="utf-8")) == ("executor.yaml", TEMPLATE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


WITHOUT: dict[str, tuple[dict[str, str], str]] = {
    "no variables": ({}, "'FINETUNE_EXECUTOR_TEMPLATE'"),
    "no pod": ({"FINETUNE_EXECUTOR_TEMPLATE": TEMPLATE}, "'FINETUNE_POD_NAME'"),
}


@pytest.mark.parametrize(("environment", "missing"), WITHOUT.values(), ids=WITHOUT)
def test_outside_of_such_a_pod_there_is_no_driver(environment: dict[str, str], missing: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        kubernetes.Driver.of(environment)
    assert refused.value.message == (
        f"data.prepare.spark.mode Kubernetes requires a pod that the operator created, and {missing} is not set: use "
        "mode Local"
    )
