"""The chart, installed by helm: upgraded under a running job, uninstalled, and no more powerful than it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.__main__ import DIGEST
from finetune_crds.base import GROUP
from finetune_crds.resources import RESOURCES
from fixtures.operator_processes.jobs import TRAINED, job, splits_given
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import World
from integration.installed.installation import RELEASE, SYSTEM, Installation
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import metric
from support.waiting import wait_for

Json = dict[str, Any]
CRDS = tuple(f"{kind.PLURAL}.{GROUP}" for kind in RESOURCES)


@pytest.fixture
def installation(installation_plane: Plane, tmp_path: Path) -> Iterator[Installation]:
    release = Installation(installation_plane, Api(installation_plane.kubeconfig), tmp_path)
    try:
        yield release
    finally:
        release.remove()
    print(release.log())


@pytest.fixture
def tenant(installation: Installation, mlflow_server: Mlflow) -> World:
    """A namespace for people's jobs."""
    return World(installation.api, mlflow_server, new_namespace(installation.api))


def values(tenant: World, *more: str) -> tuple[str, ...]:
    """The values of an installation for one namespace."""
    return f"watchNamespaces={{{tenant.namespace}}}", f"tracking.uri={tenant.mlflow.uri}", *more


def promotion(tenant: World) -> Json:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": "champion", "namespace": tenant.namespace},
        "spec": {
            "model": tenant.model,
            "alias": "champion",
            "source": {"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}},
            "onDelete": "RemoveAlias",
        },
    }


def alias(tenant: World) -> str | None:
    model = tenant.mlflow.get("registered-models/get", name=tenant.model)["registered_model"]
    return {item["alias"]: str(item["version"]) for item in model.get("aliases", [])}.get("champion")


def finish(tenant: World) -> str:
    """Play the trainer; the version."""
    version = tenant.mlflow.register(tenant.model, tenant.status("tune")["mlflow"]["runId"])
    tenant.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    tenant.wait_phase("tune", "Succeeded")
    return version


def test_roles_of_the_watched_namespace_are_enough_for_a_job_and_a_promotion(
    installation: Installation, tenant: World
) -> None:
    unwatched = World(tenant.api, tenant.mlflow, new_namespace(tenant.api))
    installation.install(*values(tenant, "log.format=json"))
    for world in (tenant, unwatched):
        world.submit(splits_given())
    tenant.api.create(promotion(tenant))
    tenant.run_pods("tune-train-1", 2)
    tenant.wait_phase("tune", "Training")
    version = finish(tenant)
    wait_for("the alias is set", lambda: alias(tenant) == version)
    tenant.api.delete("ModelPromotion", tenant.namespace, "champion")
    wait_for(
        "the promotion is gone", lambda: not tenant.api.get("ModelPromotion", tenant.namespace, "champion")
    )
    assert alias(tenant) is None
    assert unwatched.status("tune") == {"observedGeneration": -1}
    lines = [json.loads(line) for line in installation.log().splitlines()]
    assert [line for line in lines if line["severity"] not in ("debug", "info")] == []
    assert any(tenant.namespace in line["message"] for line in lines)


def test_roles_of_the_watched_namespace_are_enough_to_ask_for_kueue(
    installation: Installation, tenant: World
) -> None:
    installation.install(*values(tenant))
    tenant.submit(splits_given(runPolicy={"queueName": "gpus"}))
    # NB: without the rule the API server would refuse the question, and whether there is a Kueue would be unknown.
    condition = tenant.wait_condition("tune", "Trained", "QueueInadmissible")
    assert "Kueue is not installed in this cluster" in condition["message"]
    tenant.submit(job("prepared", runPolicy={"queueName": "gpus"}))
    tenant.wait_condition("prepared", "PodsAdmitted", "QueueInadmissible")


def test_the_cluster_role_is_enough_to_name_the_gpus_of_a_node(
    installation: Installation, tenant: World
) -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    tenant.api.create(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-node", "labels": labels}}
    )
    installation.install(f"tracking.uri={tenant.mlflow.uri}")
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    template = {"spec": {"nodeName": "gpu-node", "containers": [container]}}
    tenant.submit(splits_given(pods={"train": {"template": template}}))
    tenant.run_pods("tune-train-1", 2)
    status = tenant.wait_phase("tune", "Training")
    assert status["device"] == {
        "type": "GPU",
        "count": 16,
        "product": "NVIDIA-H100-80GB-HBM3",
        "summary": "16x NVIDIA-H100-80GB-HBM3",
    }
    placed = [(item["nodeRank"], item["node"], item["ready"]) for item in status["nodes"]["pods"]]
    assert placed == [(0, "gpu-node", True), (1, "gpu-node", True)]
    tenant.api.delete("Node", "", "gpu-node")


def test_without_the_right_to_secrets_a_job_that_names_one_is_told_what_to_install(
    installation: Installation, tenant: World
) -> None:
    installation.install(*values(tenant, "rbac.trackingSecrets=false"))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "login", "namespace": tenant.namespace},
        "stringData": {"MLFLOW_TRACKING_TOKEN": "t"},
    }
    tenant.api.create(secret)
    tenant.submit(splits_given(tracking={"uri": tenant.mlflow.uri, "secretRef": {"name": "login"}}))
    condition = tenant.wait_condition("tune", "Tracked", "CredentialsUnreadable")
    assert condition["message"].endswith("install the chart with rbac.trackingSecrets")
    installation.install(*values(tenant, "rbac.trackingSecrets=true"))
    tenant.wait_condition("tune", "Tracked", "RunReady")


@pytest.mark.parametrize(("may", "reason"), [(True, "PodsAdmitted"), (False, "NotChecked")])
def test_training_pods_are_judged_before_the_preparation_as_far_as_the_role_lets_the_operator(
    installation: Installation, tenant: World, *, may: bool, reason: str
) -> None:
    installation.install(*values(tenant))
    if not may:
        role = tenant.api.get("Role", tenant.namespace, RELEASE) or {}
        rules = [
            rule for rule in role["rules"] if rule["resources"] != ["pods"] or rule["verbs"] != ["create"]
        ]
        assert len(rules) == len(role["rules"]) - 1
        tenant.api.patch("Role", tenant.namespace, RELEASE, {"rules": rules})
    tenant.submit(job())
    tenant.wait_condition("tune", "PodsAdmitted", reason)
    tenant.run_pods("tune-prep", 1)
    assert ("is not checked by a dry run" in installation.log()) is not may
    tenant.delete_all()


def test_sparks_driver_waits_for_its_account_and_its_executors_are_told_of(
    installation: Installation, tenant: World
) -> None:
    installation.install(*values(tenant))
    prepare = {"output": "s3://splits/a", "spark": {"mode": "Kubernetes", "executors": 1}}
    tenant.submit(job(data={"source": {"type": "Parquet", "path": "s3://corpus/a"}, "prepare": prepare}))
    condition = tenant.wait_condition("tune", "PodsAdmitted", "ExecutorsForbidden")
    assert (
        f"ServiceAccount finetune-spark is not allowed to create pods in namespace {tenant.namespace}"
        in condition["message"]
    )
    assert tenant.api.list("Job", tenant.namespace) == []

    installation.install(*values(tenant, f"spark.namespaces={{{tenant.namespace}}}"))
    [driver] = tenant.run_pods("tune-prep", 1)
    assert driver["spec"]["serviceAccountName"] == "finetune-spark"
    tokens = [item for item in driver["spec"]["volumes"] if item["name"].startswith("kube-api-access-")]
    assert len(tokens) == 1
    uid = tenant.job("tune")["metadata"]["uid"]
    for kind in ("Service", "ConfigMap"):
        child = tenant.api.get(kind, tenant.namespace, "tune-prep")
        assert child is not None
        assert [owner["uid"] for owner in child["metadata"]["ownerReferences"]] == [uid]

    executor = tenant.api.create(executor_of(driver, tenant))
    assert not any("kube-api-access" in item["name"] for item in executor["spec"]["volumes"])
    tenant.set_waiting(executor, "ImagePullBackOff", "no such image")
    unhealthy = tenant.wait_condition("tune", "PodsHealthy", "ImagePullFailed")
    assert unhealthy["message"].startswith(f"pod {executor['metadata']['name']} cannot pull ")
    tenant.delete_all()


def executor_of(driver: Json, tenant: World) -> Json:
    """An executor as Spark makes it of its template, which the driver's pod owns."""
    env = {item["name"]: item.get("value") for item in driver["spec"]["containers"][0]["env"]}
    template = json.loads(env["FINETUNE_EXECUTOR_TEMPLATE"])
    meta = driver["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"], "controller": True}
    identity = {"name": f"{meta['name']}-exec-1", "namespace": tenant.namespace, "ownerReferences": [owner]}
    return {
        **template,
        "metadata": {**template["metadata"], **identity},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }


def test_an_upgrade_and_an_uninstall_leave_a_running_job_alone(
    installation: Installation, tenant: World
) -> None:
    installation.install(*values(tenant, "image.trainer.tag=v1"))
    tenant.submit(splits_given())
    tenant.run_pods("tune-train-1", 2)
    tenant.wait_phase("tune", "Training")
    before = tenant.settle(installation.operator)

    installation.install(*values(tenant, "image.trainer.tag=v2"))
    assert tenant.settle(installation.operator) == before
    installation.uninstall()
    assert tenant.api.get("Deployment", SYSTEM, RELEASE) is None
    assert all(tenant.api.get("CustomResourceDefinition", "", name) for name in CRDS)
    assert tenant.versions() == before

    installation.install(*values(tenant, "image.trainer.tag=v2"))
    assert tenant.settle(installation.operator) == before
    finish(tenant)


def owner_of(api: Api, crd: str) -> str:
    """The release that a CRD belongs to, for Helm."""
    definition = api.get("CustomResourceDefinition", "", crd)
    assert definition is not None
    return str(definition["metadata"]["annotations"]["meta.helm.sh/release-name"])


def test_another_release_works_over_crds_that_an_uninstalled_one_kept(
    installation: Installation, tenant: World
) -> None:
    """The CRDs are left alone while they are the chart's, and taken over with --take-ownership when they are not."""
    installation.install(*values(tenant))
    tenant.submit(splits_given())
    tenant.run_pods("tune-train-1", 2)
    tenant.wait_phase("tune", "Training")
    first = installation.release
    installation.uninstall()

    installation.release = "another"
    installation.install(*values(tenant))
    finish(tenant)
    assert {owner_of(tenant.api, crd) for crd in CRDS} == {first}
    for crd in CRDS:
        note = f"The CustomResourceDefinition {crd} belongs to the release {SYSTEM}/{first} and is the one of this chart"
        assert note in installation.notes()

    stale = {"metadata": {"annotations": {DIGEST: "that of an older chart"}}}
    for crd in CRDS:
        tenant.api.patch("CustomResourceDefinition", "", crd, stale)
    with pytest.raises(AssertionError, match="cannot be imported into the current release"):
        installation.install(*values(tenant))
    installation.install(*values(tenant), options=("--take-ownership",))
    assert {owner_of(tenant.api, crd) for crd in CRDS} == {"another"}


def found_in(api: Api, kind: str, name: str) -> Json:
    """An object of the release."""
    body = api.get(kind, SYSTEM, name)
    assert body is not None, f"there is no {kind} {name}"
    return body


SERVICE_MONITORS: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}


def test_prometheus_finds_the_operators_metrics(installation: Installation, tenant: World) -> None:
    tenant.api.create(SERVICE_MONITORS)
    wait_for(
        "ServiceMonitors are served",
        lambda: (
            "Established"
            in str(tenant.api.get("CustomResourceDefinition", "", SERVICE_MONITORS["metadata"]["name"]))
        ),
    )
    installation.install(*values(tenant, "metrics.serviceMonitor.enabled=true"))
    tenant.submit(splits_given())
    wait_for("the operator is healthy", installation.healthy)

    monitor, service, deployment = (
        found_in(tenant.api, kind, name)
        for kind, name in (
            ("ServiceMonitor", RELEASE),
            ("Service", f"{RELEASE}-metrics"),
            ("Deployment", RELEASE),
        )
    )
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    target = ports[monitor["spec"]["endpoints"][0]["port"]]
    assert target in {port["name"] for port in template["spec"]["containers"][0]["ports"]}

    wait_for(
        "a job is counted", lambda: metric(installation.operator, "finetune_operator_jobs", phase="Starting")
    )
    assert metric(installation.operator, "finetune_operator_reconcile_errors_total") == 0
