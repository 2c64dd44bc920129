"""The Job of a copy, as the API server gets it: two containers, each with the login of one server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune_operator.defaults import Defaults
from finetune_operator.modelpromotion.pods.copy_pod import build_job
from finetune_operator.modelpromotion.pods.job import add_run
from finetune_operator.settings import Settings
from unit.operator.modelpromotion.test_promotion_pods import promotion

Json = dict[str, Any]
SETTINGS = Settings(tracking_uri="http://mlflow:5000", trainer_image="trainer:1")
SOURCE: Json = {"uri": "https://mlflow.dev.example/", "model": "dev-support", "version": 3}
MOUNTS = [
    {"name": "tmp", "mountPath": "/tmp"},
    {"name": "shm", "mountPath": "/dev/shm"},
    {"name": "copied-model", "mountPath": "/var/run/finetune/copy"},
]
COMMON: Json = {
    "image": "trainer:1",
    "imagePullPolicy": "IfNotPresent",
    "terminationMessagePolicy": "FallbackToLogsOnError",
    "terminationMessagePath": "/dev/termination-log",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    },
    "volumeMounts": MOUNTS,
    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    "command": ["finetune-copy"],
}


def built(settings: Settings = SETTINGS, tracking: Json | None = None, **registry: Any) -> Json:
    resource, spec = promotion(
        source={"type": "Registry", "registry": SOURCE | registry}, tracking=tracking or {}
    )
    assert spec.source.registry
    job = build_job(
        resource,
        spec,
        settings,
        source=spec.source.registry,
        version="3",
        identity="d1",
        name="champion-copy-1",
    )
    return add_run(job, "run-1")


def containers(job: Json) -> tuple[Json, Json]:
    """The containers that download and upload."""
    pod = job["spec"]["template"]["spec"]
    [download], [main] = pod["initContainers"], pod["containers"]
    return download, main


def variable(name: str, value: str) -> Json:
    return {"name": name, "value": value}


def test_each_container_has_the_address_and_the_login_of_one_server() -> None:
    job = built(secretRef={"name": "dev"}, tracking={"secretRef": {"name": "prod"}})
    assert containers(job) == (
        {
            **COMMON,
            "name": "download",
            "args": ["--from", "models:/dev-support/3"],
            "env": [
                variable("HOME", "/tmp"),
                variable("MLFLOW_TRACKING_URI", "https://mlflow.dev.example"),
                variable("MLFLOW_REGISTRY_URI", "https://mlflow.dev.example"),
            ],
            "envFrom": [{"secretRef": {"name": "dev", "optional": False}}],
        },
        {
            **COMMON,
            "name": "main",
            "args": ["--to", "support", "--source", "https://mlflow.dev.example", "--digest", "d1"],
            "env": [
                variable("HOME", "/tmp"),
                variable("MLFLOW_TRACKING_URI", "http://mlflow:5000"),
                variable("MLFLOW_REGISTRY_URI", "http://mlflow:5000"),
                variable("MLFLOW_RUN_ID", "run-1"),
            ],
            "envFrom": [{"secretRef": {"name": "prod", "optional": False}}],
        },
    )


def test_the_job_is_bounded() -> None:
    job = built()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], "ttlSecondsAfterFinished" in spec) == (3, False)
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [64]}},
    ]
    assert pod["activeDeadlineSeconds"] == 6 * 3600
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    assert job["metadata"]["labels"]["finetune.dev/component"] == "copy"
    assert built(timeoutSeconds=60)["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 60


def test_no_login_of_the_installation_or_of_the_destination_reaches_the_download() -> None:
    pods = {
        "all": {
            "env": [variable("MLFLOW_TRACKING_TOKEN", "prod"), variable("HTTPS_PROXY", "http://proxy:3128")],
            "envFrom": [{"secretRef": {"name": "prod"}}],
        }
    }
    settings = replace(SETTINGS, defaults=Defaults.model_validate({"pods": pods}))
    download, main = containers(built(settings))
    assert "envFrom" not in download
    assert [item["name"] for item in download["env"]] == [
        "HOME",
        "HTTPS_PROXY",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_REGISTRY_URI",
    ]
    assert variable("MLFLOW_TRACKING_TOKEN", "prod") in main["env"]


def test_a_template_changes_both_containers_and_the_volume_but_not_what_they_do() -> None:
    claim = {"name": "copied-model", "ephemeral": {"volumeClaimTemplate": {}}}
    limits = {"limits": {"memory": "4Gi", "cpu": 2}}
    template = {
        "spec": {
            "volumes": [claim],
            "containers": [{"name": "main", "resources": limits, "command": ["sh"]}],
            "initContainers": [
                {"name": "download", "args": ["x"], "env": [variable("AWS_PROFILE", "dev")]},
                {"name": "other", "image": "busybox"},
            ],
            "restartPolicy": "OnFailure",
        }
    }
    job = built(template=template)
    pod = job["spec"]["template"]["spec"]
    [download, other], [main] = pod["initContainers"], pod["containers"]
    assert (download["resources"], main["resources"]) == (limits, limits)
    assert (download["command"], main["command"]) == (["finetune-copy"], ["finetune-copy"])
    assert download["args"] == ["--from", "models:/dev-support/3"]
    assert variable("AWS_PROFILE", "dev") in download["env"]
    assert variable("AWS_PROFILE", "dev") not in main["env"]
    assert other == {"name": "other", "image": "busybox"}
    assert pod["volumes"][-1] == claim
    assert pod["restartPolicy"] == "Never"
