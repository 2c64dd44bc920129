"""A preparation as a SparkApplication, with the real CRD on a real API server. The tests play the spark-operator and the kubelet."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster.crds import SPARK_APPLICATION
from finetune_crds.contract import TerminationMessage
from finetune_crds.reference import SAMPLES
from finetune_operator import names
from fixtures.operator_processes.jobs import PREPARED, error, job
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import OwnWorld, World
from integration.chart_without_crds import objects
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]


@pytest.fixture(scope="module")
def spark_operator(api: Api, plane: Plane) -> Iterator[None]:
    """The CRD of the spark-operator, without the spark-operator."""
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig)]
    # NB: Python takes seconds to read it.
    create = [*kubectl, "create", "--filename", str(SPARK_APPLICATION.path())]
    subprocess.run(create, check=True, capture_output=True)

    def served() -> bool:
        command = [*kubectl, "get", "sparkapplications", "--all-namespaces"]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    wait_for("SparkApplications are served", served)
    yield
    api.delete("CustomResourceDefinition", "", "sparkapplications.sparkoperator.k8s.io")


def allow(world: World) -> None:
    """What the chart does in a namespace of `spark.namespaces`."""
    meta = {"name": names.SPARK_ACCOUNT, "namespace": world.namespace}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.SPARK_ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": names.SPARK_ACCOUNT, "namespace": world.namespace}
    rbac = "rbac.authorization.k8s.io/v1"
    world.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    world.api.create({"apiVersion": rbac, "kind": "Role", "metadata": meta, "rules": [rule]})
    binding = {"apiVersion": rbac, "kind": "RoleBinding", "metadata": meta}
    world.api.create({**binding, "roleRef": role, "subjects": [subject]})


def submit(world: World, **prepare: Any) -> None:
    allow(world)
    prepare_body = {"output": "s3://splits/a", "spark": {"mode": "SparkApplication"}, **prepare}
    world.submit(job(data={"source": {"type": "Parquet", "path": "s3://corpus/a"}, "prepare": prepare_body}))


def application(world: World, name: str = "tune-prep-1") -> Json:
    return wait_for(
        f"SparkApplication {name}",
        lambda: world.api.get("SparkApplication", world.namespace, name),
        world.patience,
    )


def report(world: World, state: str, name: str = "tune-prep-1", message: str = "") -> None:
    """Play the spark-operator: the state of a SparkApplication."""
    application_state = {"state": state, **({"errorMessage": message} if message else {})}
    status = {"applicationState": application_state, "driverInfo": {"podName": f"{name}-driver"}}
    world.api.patch("SparkApplication", world.namespace, name, {"status": status}, status=True)


def drive(world: World, name: str = "tune-prep-1") -> Json:
    """Play spark-submit: the pod of the driver, made of its template; and the state of the SparkApplication."""
    spark_application = application(world, name)
    driver, template = spark_application["spec"]["driver"], spark_application["spec"]["driver"]["template"]
    main, *sidecars = template["spec"]["containers"]
    main = {
        **main,
        "image": spark_application["spec"]["image"],
        "args": ["driver", spark_application["spec"]["mainApplicationFile"]],
    }
    meta = {
        **template["metadata"],
        "name": driver["podName"],
        "namespace": world.namespace,
        "labels": {
            **template["metadata"]["labels"],
            **spark_application["metadata"]["labels"],
            "sparkoperator.k8s.io/app-name": name,
            "spark-role": "driver",
        },
    }
    spec = {
        **template["spec"],
        "serviceAccountName": driver["serviceAccount"],
        "containers": [main, *sidecars],
    }
    pod = world.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}, strict=True)
    report(world, "SUBMITTED", name)
    return pod


def end(world: World, pod: Json, code: int, message: TerminationMessage | None = None) -> None:
    """Play the kubelet: the driver ends, and the spark-operator sees it."""
    container = pod["spec"]["containers"][0]
    terminated = {
        "exitCode": code,
        "reason": "Error" if code else "Completed",
        "message": message.dump() if message else "",
        "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    status = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "restartCount": 0,
        "ready": False,
        "state": {"terminated": terminated},
    }
    phase = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [status]}
    meta = pod["metadata"]
    world.api.patch("Pod", meta["namespace"], meta["name"], {"status": phase}, status=True)
    why = f"driver container failed with ExitCode: {code}" if code else ""
    report(world, "FAILED" if code else "COMPLETED", pod["metadata"]["name"].removesuffix("-driver"), why)


def held(world: World) -> Json:
    return dict(world.status("tune").get("sparkApplication") or {})


def test_a_job_waits_for_the_spark_operator_and_then_for_its_result(
    world: World, request: pytest.FixtureRequest
) -> None:
    submit(world)
    condition = world.wait_condition("tune", "Prepared", "SparkOperatorMissing")
    assert "install the spark-operator, and the job continues" in condition["message"]
    assert held(world) == {}

    request.getfixturevalue("spark_operator")
    spark_application = application(world)
    uid = world.job("tune")["metadata"]["uid"]
    assert [owner["uid"] for owner in spark_application["metadata"]["ownerReferences"]] == [uid]
    wait_for(
        "the sentence",
        lambda: "waits for the spark-operator" in world.condition("tune", "Prepared")["message"],
    )
    driver = drive(world)
    assert [owner["uid"] for owner in driver["metadata"]["ownerReferences"]] == [uid]
    report(world, "RUNNING")
    wait_for("Running", lambda: held(world).get("state") == "Running")
    end(world, driver, 0, PREPARED)
    status = world.wait_phase("tune", "Starting")
    assert (status["data"]["path"], status["data"]["version"]) == ("/data/splits", 7)
    assert status["sparkApplication"] == {
        "attempt": 1, "failures": 0, "name": "tune-prep-1", "state": "Completed"
    }  # fmt: skip


def test_the_sample(world: World, spark_operator: None) -> None:
    allow(world)
    body = yaml.safe_load((SAMPLES / "spark-application.yaml").read_text(encoding="utf-8"))
    world.submit(body)
    name, child = body["metadata"]["name"], "spark-application-prep-1"
    spark_spec = application(world, child)["spec"]
    executor = spark_spec["executor"]
    assert (executor["instances"], executor["cores"], executor["memory"]) == (2, 1, "1048576k")
    assert (spark_spec["driver"]["coreRequest"], spark_spec["driver"]["memory"]) == ("500m", "1048576k")
    assert spark_spec["sparkConf"]["spark.sql.shuffle.partitions"] == "8"
    driver = drive(world, child)
    (variables,) = driver["spec"]["containers"][0]["envFrom"]
    assert variables["secretRef"]["name"] == "s3-credentials"
    report(world, "RUNNING", child)
    end(world, driver, 0, PREPARED)
    status = world.wait_phase(name, "Starting")
    assert status["sparkApplication"]["state"] == "Completed"
    assert world.wait_pods(f"{name}-train-1", 1)


def test_a_failure_of_the_data_ends_the_job(world: World, spark_operator: None) -> None:
    submit(world)
    end(world, drive(world), 65, error("MissingColumn", "it has no column answer"))
    status = world.wait_phase("tune", "Failed")
    assert (status["lastFailure"]["exitCode"], status["lastFailure"]["reason"]) == (65, "MissingColumn")
    assert world.condition("tune", "Failed")["message"] == (
        "preparation failed in pod tune-prep-1-driver of SparkApplication tune-prep-1: it has no column answer; "
        "this job has finished: create a FineTuneJob with another name and the correction, or delete this job first"
    )


def test_another_failure_is_followed_by_another_name_and_an_operator_that_starts_again_goes_on(
    own_world: OwnWorld, spark_operator: None
) -> None:
    world = own_world
    submit(world)
    end(world, drive(world), 1)
    driver = drive(world, "tune-prep-2")
    report(world, "RUNNING", "tune-prep-2")
    before = wait_for("Running", lambda: held(world) if held(world).get("state") == "Running" else None)
    assert before == {"attempt": 2, "failures": 1, "name": "tune-prep-2", "state": "Running"}
    uid = application(world, "tune-prep-2")["metadata"]["uid"]
    world.operator.kill()
    end(world, driver, 0, PREPARED)
    world.operator.start()
    world.wait_phase("tune", "Starting")
    uids = {
        item["metadata"]["name"]: item["metadata"]["uid"]
        for item in world.api.list("SparkApplication", world.namespace)
    }
    assert sorted(uids) == ["tune-prep-1", "tune-prep-2"]
    assert uids["tune-prep-2"] == uid


def left(world: World) -> list[str]:
    """The SparkApplications and drivers that exist."""
    return [
        item["metadata"]["name"]
        for kind in ("SparkApplication", "Pod")
        for item in world.api.list(kind, world.namespace, f"{names.LABEL_COMPONENT}={names.PREP}")
    ]


def test_a_job_that_is_suspended_or_deleted_stops_its_driver(world: World, spark_operator: None) -> None:
    submit(world)
    drive(world)
    report(world, "RUNNING")
    wait_for("Running", lambda: held(world).get("state") == "Running")
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": True}})
    wait_for("nothing is left", lambda: left(world) == [])
    wait_for("Deleted", lambda: held(world).get("state") == "Deleted")
    assert world.wait_condition("tune", "Suspended", "Suspended")["status"] == "True"

    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": False}})
    drive(world, "tune-prep-2")
    wait_for("Submitted", lambda: held(world).get("state") == "Submitted")
    world.api.delete("FineTuneJob", world.namespace, "tune")
    # NB: the garbage collector learns of a new kind within half a minute.
    wait_for("nothing is left", lambda: left(world) == [], 90)


def with_template(role: str, **pod_spec: Any) -> Json:
    """A change of the pod template of the driver or of the executors."""
    return {role: {"template": {"spec": pod_spec}}}


PRIVILEGED = {"containers": [{"name": "spark", "securityContext": {"privileged": True}}]}
HOST_PATH = {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}
OUTSIDE = (
    "hostNetwork, securityContext, sidecars, initContainers or priorityClassName outside of the pod templates"
)
# Changes of the SparkApplication that the operator creates, and what the policy says of them.
PRIVILEGES: dict[str, tuple[Json, str]] = {
    "none": ({}, ""),
    "a path of the driver": (with_template("driver", **HOST_PATH), "a hostPath volume"),
    "a privileged executor": (with_template("executor", **PRIVILEGED), "a container with privileged"),
    "the network of the node": (with_template("driver", hostNetwork=True), "hostNetwork"),
    "a path beside the templates": (HOST_PATH, "a hostPath volume outside of the pod templates"),
    "a path of Spark's settings": (
        {"sparkConf": {"spark.kubernetes.executor.volumes.hostPath.a.mount.path": "/a"}},
        "a hostPath volume outside of the pod templates",
    ),
    "a sidecar beside the templates": ({"driver": {"sidecars": [{"name": "a", "image": "a:1"}]}}, OUTSIDE),
}


def merge(below: Json, change: Json) -> Json:
    """An object with a change, as a merge patch makes it."""
    merged = below | change
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            merged[name] = merge(below[name], value)
    return merged


def try_as_operator(plane: Plane, body: Json) -> str:
    """Create a SparkApplication in a dry run as the operator's ServiceAccount, and return why the policy refuses it."""
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig)]
    account = ("--as=system:serviceaccount:fs:finetune-operator", "--as-group=system:masters")
    command = [*kubectl, "create", "--dry-run=server", *account, "--filename", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(body), capture_output=True, text=True, check=False)
    refusal = done.stderr.partition("denied request: ")[2].partition(" is permitted only in")[0]
    assert (refusal == "") == (done.returncode == 0), done.stderr
    return refusal


def test_the_policy_of_the_chart_keeps_sparkapplications_from_the_node(
    world: World, plane: Plane, spark_operator: None
) -> None:
    submit(world)
    created = application(world)
    body = {name: created[name] for name in ("apiVersion", "kind", "spec")}
    body["metadata"] = {"name": "tried", "namespace": world.namespace}
    tenants = (f"tenancy.tenants[0].namespaces={{{world.namespace}}}", "rbac.sparkApplications=true")
    name = "finetune-operator-sparkapplications"
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    chart_objects = [objects(*tenants)[kind, name] for kind in kinds]
    try:
        for item in chart_objects:
            world.api.create(item)
        tried = {
            name: {**body, "spec": merge(created["spec"], change)} for name, (change, _) in PRIVILEGES.items()
        }
        wait_for("the policy counts", lambda: try_as_operator(plane, tried["a path of the driver"]))
        assert {name: try_as_operator(plane, item) for name, item in tried.items()} == {
            name: what for name, (_, what) in PRIVILEGES.items()
        }
    finally:
        for kind in reversed(kinds):
            world.api.delete(kind, "", name)
