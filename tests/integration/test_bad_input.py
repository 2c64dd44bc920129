"""Bad input is refused in a sentence, at the earliest place that can know."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from fixtures.operator_processes.jobs import PREPARED, TRAINED, error, job, splits_given
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import OwnWorld, World
from integration.schema.jobs import prepared
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, watching
from support.ports import free_port
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]


def test_a_wrong_recipe_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(splits_given())
    sentence = "model.base /models/base does not exist in the pod: mount the volume in spec.pods"
    world.run_pods("tune-train-1", 2)
    world.end_pods(
        "tune-train-1", [64, 64], [error("ModelNotFound", sentence), error("ModelNotFound", sentence)]
    )
    status = world.wait_phase("tune", "Failed")
    assert status["restarts"] == 0
    assert {key: status["lastFailure"][key] for key in ("exitCode", "reason", "message", "attempt")} == {
        "exitCode": 64,
        "reason": "ModelNotFound",
        "message": sentence,
        "attempt": 1,
    }
    failed = world.condition("tune", "Failed")
    assert failed["reason"] == "RecipeWrong"
    assert sentence in failed["message"]
    assert [job["metadata"]["name"] for job in world.api.list("Job", world.namespace)] == ["tune-train-1"]
    wait_for("a Warning Event", lambda: world.events("RecipeWrong"))
    world.wait_condition("tune", "Tracked", "RunFinished")
    runs = world.mlflow.runs_of(world.job("tune")["metadata"]["uid"])
    assert [run["info"]["status"] for run in runs] == ["FAILED"]


def test_wrong_data_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(job())
    sentence = "the source /data/corpus has no column answer; it has: question, reply"
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [65], [error("MissingColumn", sentence)])
    status = world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "DataWrong"
    assert (status["lastFailure"]["exitCode"], status["lastFailure"]["message"]) == (65, sentence)


def test_what_is_not_implemented_is_refused_by_name(world: World) -> None:
    world.submit(job(tracking={"uri": "file:/runs"}))
    accepted = world.wait_condition("tune", "Accepted", "NotImplemented")
    assert (
        "tracking.uri file:/runs (use the http or https address of an MLflow server, or databricks)"
        in accepted["message"]
    )
    assert world.api.list("Job", world.namespace) == []


def test_reserved_environment_in_a_pod_template_is_refused(world: World) -> None:
    containers = [{"name": "main", "env": [{"name": "WORLD_SIZE", "value": "1"}]}]
    world.submit(splits_given(pods={"train": {"template": {"spec": {"containers": containers}}}}))
    message = "spec.pods.train.template sets WORLD_SIZE, which the operator sets: remove the variable"
    assert world.wait_condition("tune", "Accepted", "PodTemplateInvalid")["message"] == message
    assert holding(world) == ["Stalled"]
    change(world, pods=None)
    world.run_pods("tune-train-1", 2)


def test_registering_without_a_server_waits_until_the_installation_has_one(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    settings = watching(namespace, "")
    with running(forked_operator(kubeconfig, tmp_path / "without.log", settings)):
        world = World(api, mlflow_server, namespace)
        world.submit(splits_given())
        condition = world.wait_condition("tune", "Accepted", "MlflowNotConfigured")
        assert condition["message"].startswith(
            "spec.register requires an MLflow server: install the chart with"
        )
        assert holding(world) == ["Reconciling"]
    settings = watching(namespace, mlflow_server.uri)
    with running(forked_operator(kubeconfig, tmp_path / "with.log", settings)):
        world.run_pods("tune-train-1", 2)
        world.delete_all()


def holding(world: World, name: str = "tune") -> list[str]:
    """Which conditions of the summary are True."""
    conditions = world.status(name)["conditions"]
    return [
        item["type"]
        for item in conditions
        if item["type"] in ("Ready", "Reconciling", "Stalled", "Finished") and item["status"] == "True"
    ]


def change(world: World, **spec: Any) -> None:
    """Change parts of the spec; None takes a part away."""
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": spec})


GPU: Json = {"limits": {"cpu": "1"}}
TYPO: Json = {"spec": {"containers": [{"name": "main", "resource": GPU}]}}
RIGHT: Json = {"spec": {"containers": [{"name": "main", "resources": GPU}]}}
PRIVILEGED: Json = {
    "spec": {
        "containers": [
            {"name": "main", "securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}
        ]
    }
}


@pytest.mark.parametrize(("body", "first"), [(job, ("tune-prep", 1)), (splits_given, ("tune-train-1", 2))])
def test_a_typo_in_a_pod_template_is_told_at_once_until_it_is_corrected(
    world: World, body: Callable[..., Json], first: tuple[str, int]
) -> None:
    world.submit(body(pods={"train": {"template": TYPO}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "PodTemplateInvalid")
    assert re.search(
        'unknown field "spec[.](template[.]spec[.])?containers.0.[.]resource"', condition["message"]
    )
    assert (holding(world), children(world)) == (["Stalled"], [])
    change(world, pods={"train": {"template": RIGHT}})
    world.run_pods(*first)
    wait_for("it goes on", lambda: holding(world) == ["Reconciling"])


@pytest.mark.parametrize(("body", "first"), [(job, ("tune-prep", 1)), (splits_given, ("tune-train-1", 2))])
def test_a_policy_that_forbids_the_pods_is_told_before_anything_is_created(
    world: World, body: Callable[..., Json], first: tuple[str, int]
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    world.api.patch("Namespace", "", world.namespace, {"metadata": {"labels": label}})
    world.submit(body(pods={"train": {"template": PRIVILEGED}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "PodRejected")
    assert 'violates PodSecurity "restricted:latest"' in condition["message"]
    assert "correct spec.pods.train" in condition["message"]
    assert (holding(world), children(world)) == (["Reconciling"], [])
    change(world, pods=None)
    world.run_pods(*first)


def test_what_the_pods_lack_may_come_while_the_spec_stays(world: World) -> None:
    name = f"late-{world.namespace}"
    world.submit(job(pods={"train": {"template": {"spec": {"priorityClassName": name}}}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "PodRejected")
    assert f"no PriorityClass with name {name} was found" in condition["message"]
    assert (holding(world), children(world)) == (["Reconciling"], [])
    late = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
    world.api.create({**late, "value": 1})
    world.run_pods("tune-prep", 1)
    world.wait_condition("tune", "PodsAdmitted", "PodsAdmitted")
    world.api.delete("PriorityClass", "", name)


def test_a_service_account_that_is_missing_is_told_and_waited_for(world: World) -> None:
    world.submit(job(pods={"all": {"serviceAccountName": "late"}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "CheckFailed")
    assert 'serviceaccount "late" not found' in condition["message"]
    assert (condition["status"], holding(world), children(world)) == ("Unknown", ["Reconciling"], [])
    meta = {"name": "late", "namespace": world.namespace}
    world.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    world.run_pods("tune-prep", 1)


@pytest.mark.parametrize(
    "rule",
    [
        "has(object.metadata.ownerReferences) && object.metadata.ownerReferences.exists(o, o.controller)",
        "'batch.kubernetes.io/job-name' in object.metadata.labels",
        "'batch.kubernetes.io/job-completion-index' in object.metadata.annotations",
    ],
)
def test_a_policy_against_pods_that_nothing_controls_refuses_no_training_pod(
    world: World, plane: Plane, rule: str
) -> None:
    name = f"naked-{world.namespace}"
    metadata = {"name": name}
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    where = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    group = "admissionregistration.k8s.io/v1"
    constraints = {"resourceRules": rules, "namespaceSelector": where}
    no_field = "has(object.metadata.labels) && has(object.metadata.annotations)"
    policy = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "matchConstraints": constraints,
            "validations": [{"expression": f"{no_field} && {rule}", "message": "naked pods are not allowed"}],
        },
    }
    binding = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    try:
        world.api.create(policy)
        world.api.create(binding)
        wait_for("the policy counts", lambda: "naked pods" in naked_pod(world, plane))
        world.submit(job())
        assert world.wait_condition("tune", "PodsAdmitted", "PodsAdmitted")["status"] == "True"
    finally:
        for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
            world.api.delete(kind, "", name)


def naked_pod(world: World, plane: Plane) -> str:
    """What the API server says of a pod with the fields that a rule reads, which nothing controls."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "naked", "labels": {"a": "b"}, "annotations": {"a": "b"}},
        "spec": {"containers": [{"name": "a", "image": "a"}]},
    }
    create = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", world.namespace]
    create += ["create", "--dry-run=server", "--filename", "-"]
    return subprocess.run(create, input=json.dumps(body), text=True, check=False, capture_output=True).stderr


def children(world: World) -> list[str]:
    """The kinds of what the operator has created."""
    kinds = ("Job", "Service", "ConfigMap", "NetworkPolicy")
    selector = "app.kubernetes.io/managed-by=finetune-operator"
    return [kind for kind in kinds if world.api.list(kind, world.namespace, selector)]


def test_a_quota_that_is_used_up_is_told_before_the_preparation_which_goes_on(world: World) -> None:
    # The pod of the preparation fits, and one that asks for a CPU does not.
    limit(world, {"limits.cpu": "500m"})
    small = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "100m"}}}]}}
    large = {"spec": {"containers": [{"name": "main", "resources": GPU}]}}
    world.submit(job(data=prepared(), pods={"prepare": {"template": small}, "train": {"template": large}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "QuotaExceeded")
    assert "exceeded quota: few, requested: limits.cpu=1" in condition["message"]
    world.run_pods("tune-prep", 1)
    assert holding(world) == ["Reconciling"]
    assert world.condition("tune", "Ready")["reason"] == "QuotaExceeded"
    world.end_pods("tune-prep", [0], [PREPARED])
    world.wait_condition("tune", "PodsHealthy", "PodRejected")
    world.api.delete("ResourceQuota", world.namespace, "few")
    world.run_pods("tune-train-1", 2)
    assert world.condition("tune", "PodsAdmitted") == {}


def limit(world: World, hard: Json) -> None:
    """Create a quota, and wait until it counts."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": world.namespace},
        "spec": {"hard": hard},
    }
    world.api.create(quota)
    wait_for(
        "the quota counts",
        lambda: (world.api.get("ResourceQuota", world.namespace, "few") or {}).get("status", {}).get("hard"),
    )


def test_pods_that_cannot_run_are_named_with_the_reason(world: World) -> None:
    world.submit(splits_given())
    first, second = world.wait_pods("tune-train-1", 2)
    world.set_waiting(second, "ImagePullBackOff", 'Back-off pulling image "nowhere/none:1"')
    condition = world.wait_condition("tune", "PodsHealthy", "ImagePullFailed")
    assert second["metadata"]["name"] in condition["message"]
    assert "nowhere/none:1" in condition["message"]
    waiting = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes: no GPU",
    }
    meta = first["metadata"]
    world.api.patch(
        "Pod", meta["namespace"], meta["name"], {"status": {"conditions": [waiting]}}, status=True
    )
    condition = world.wait_condition("tune", "PodsHealthy", "Unschedulable")
    assert condition["message"].startswith(f"pod {meta['name']} cannot be scheduled: 0/2 nodes: no GPU")


def test_pods_that_the_api_server_rejects_are_explained(world: World) -> None:
    limit(world, {"pods": "0"})
    world.submit(splits_given())
    condition = world.wait_condition("tune", "PodsHealthy", "PodRejected")
    assert "exceeded quota: few" in condition["message"]


def test_a_child_name_that_is_taken_is_said(world: World) -> None:
    world.api.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "tune", "namespace": world.namespace},
            "spec": {"ports": [{"port": 80}]},
        }
    )
    world.submit(splits_given())
    condition = world.wait_condition("tune", "PodsHealthy", "NameTaken")
    assert condition["message"].startswith("Service tune exists and has another owner")
    world.api.delete("Service", world.namespace, "tune")
    world.run_pods("tune-train-1", 2)


def test_a_script_that_registers_nothing_is_told_so(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "RegistrationFailed"


def test_mlflow_away_at_the_start_is_waited_for_and_away_later_stops_nothing(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path, forked=True)
    operator = forked_operator(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(operator):
        world = World(api, server, namespace)
        world.submit(job())
        world.run_pods("tune-prep", 1)
        world.end_pods("tune-prep", [0], [PREPARED])
        condition = world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert condition["message"].startswith(f"MLflow at {server.uri} cannot be reached")
        waiting = world.wait_condition("tune", "Trained", "MlflowUnreachable")
        assert waiting["message"].startswith("training waits for MLflow")
        with running(server):
            world.run_pods("tune-train-1", 2)
            world.wait_condition("tune", "Tracked", "RunReady")
            run_id = world.status("tune")["mlflow"]["runId"]
        world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert world.wait_phase("tune", "Training")["attempt"] == 1
        with running(server):
            server.register(world.model, run_id)
            world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
            world.wait_phase("tune", "Succeeded")


def test_mlflow_that_refuses_its_host_name_says_what_to_set(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path, allowed_hosts="mlflow.example.org", forked=True)
    operator = forked_operator(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(server), running(operator):
        world = World(api, server, namespace)
        world.submit(splits_given())
        condition = world.wait_condition("tune", "Tracked", "MlflowHostNotAllowed")
        assert f"add '127.0.0.1:{server.port}' to its --allowed-hosts" in condition["message"]


def test_a_missing_tracking_secret_is_named(world: World) -> None:
    tracking = {"uri": f"http://127.0.0.1:{free_port()}", "secretRef": {"name": "absent"}}
    world.submit(splits_given(tracking=tracking))
    condition = world.wait_condition("tune", "Tracked", "CredentialsMissing")
    assert condition["message"].startswith("Secret absent of spec.tracking.secretRef does not exist")
    waiting = world.wait_condition("tune", "Trained", "CredentialsMissing")
    assert waiting["message"].startswith("training waits for MLflow: Secret absent")
    assert holding(world) == ["Reconciling"]
    assert world.condition("tune", "Ready")["reason"] == "CredentialsMissing"


def test_a_job_that_is_nested_deeply_stops_no_other(own_world: OwnWorld, plane: Plane) -> None:
    deep_json = '{"a": ' * 3_000 + "1" + "}" * 3_000
    body = splits_given("deep", pods={"train": {"template": {"spec": {"affinity": "DEEP"}}}})
    body["metadata"]["namespace"] = own_world.namespace
    path = f"/apis/{API_VERSION}/namespaces/{own_world.namespace}/finetunejobs"
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig)]
    create = [*kubectl, "create", "--raw", path, "-f", "-"]
    text = json.dumps(body).replace('"DEEP"', deep_json)
    subprocess.run(create, input=text, text=True, check=True, capture_output=True)
    try:
        # A watch reads the job at first, and a list after the restart.
        reasons = "-o=jsonpath={.status.conditions[*].reason}"
        wait_for(
            "the job is refused",
            lambda: (
                "PodTemplateInvalid"
                in plane.run_kubectl(own_world.namespace, "get", "finetunejob", "deep", reasons)
            ),
        )
        own_world.restart()
        own_world.submit(splits_given())
        own_world.run_pods("tune-train-1", 2)
        own_world.wait_phase("tune", "Training")
    finally:
        subprocess.run([*kubectl, "delete", "--raw", f"{path}/deep"], check=True, capture_output=True)
