"""Spark executors in pods of their own: what the operator makes around the driver, and what it says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.preparation import executors
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NOW,
    SETTINGS,
    UID,
    applied,
    child,
    conclude,
    condition,
    controller,
    ftj,
    later,
    observed,
    pod,
    said,
    stamped,
    status,
)

Json = dict[str, Any]
JOB = "tune-prep"
DRIVER = f"{JOB}-0-abcde"
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
NEW = status(ADMITTED)
BEFORE = status(PREPARING, start_time=NOW)


def data(*, path: str = "s3://corpora/a", output: str = "s3://splits/a", **prepare: Any) -> Json:
    return {
        "source": {"type": "Parquet", "path": path},
        "prepare": {"output": output, "spark": {"mode": "Kubernetes"}, **prepare},
    }


def pods(**settings: Any) -> Json:
    """What the pods of the preparation get, as a part of a job."""
    return {"pods": {"prepare": settings}}


def resolved(**parts: Any) -> FineTuneJobSpec:
    """The spec of a job as the operator resolves it."""
    found = ftj(NEW, **parts).spec
    assert found
    return found


def children(prepare: Json | None = None, settings: Settings = SETTINGS, **parts: Any) -> dict[str, Json]:
    """What is made of a new job, by kind."""
    bodies = conclude(ftj(NEW, data=data(**(prepare or {})), **parts), settings=settings).apply
    return {body["kind"]: body for body in bodies}


def template(bodies: dict[str, Json]) -> Json:
    """The pod template of the executors, as the driver reads it."""
    [driver] = bodies["Job"]["spec"]["template"]["spec"]["containers"][:1]
    [text] = [item["value"] for item in driver["env"] if item["name"] == "FINETUNE_EXECUTOR_TEMPLATE"]
    return dict(json.loads(text.replace("$$", "$")))


def test_a_driver_has_a_service_by_which_executors_find_it() -> None:
    decision = conclude(ftj(NEW, data=data()), settings=SETTINGS)
    assert applied(decision) == [
        "Service/tune-prep",
        "ConfigMap/tune-prep",
        "NetworkPolicy/tune",
        "Job/tune-prep",
    ]
    service, _, _, job = decision.apply
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"finetune.dev/job-uid": UID, "finetune.dev/component": "prep"},
        "ports": [
            {"name": "driver", "port": 7078, "protocol": "TCP"},
            {"name": "blocks", "port": 7079, "protocol": "TCP"},
        ],
    }
    assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == [UID]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_a_driver_knows_its_pod_and_may_call_the_api_server() -> None:
    driver = children()["Job"]["spec"]["template"]["spec"]
    assert (driver["serviceAccountName"], driver["automountServiceAccountToken"]) == ("finetune-spark", True)
    env = {item["name"]: item.get("value", item.get("valueFrom")) for item in driver["containers"][0]["env"]}
    variables = {
        "FINETUNE_POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "FINETUNE_POD_NAMESPACE": "team",
        "FINETUNE_DRIVER_HOST": "tune-prep.team.svc",
        "FINETUNE_EXECUTOR_SELECTOR": f"finetune.dev/job-uid={UID},finetune.dev/component=prep-executor",
    }
    assert variables.items() <= env.items()


def test_no_other_pod_of_a_job_gets_a_token() -> None:
    objects = conclude(ftj(data=data()), settings=SETTINGS, answer=None).dry_runs
    trainers = [body["spec"] for body in objects if body["kind"] == "Pod"]
    alone = conclude(ftj(NEW, data=data(spark={"mode": "Local"})), settings=SETTINGS).apply
    local = [body["spec"]["template"]["spec"] for body in alone if body["kind"] == "Job"]
    tokens = [
        pod["automountServiceAccountToken"] for pod in (*trainers, *local, template(children())["spec"])
    ]
    assert tokens == [False, False, False]


TEAM: Json = {"spec": {"serviceAccountName": "from-template"}}
OF_THE_JOB: Json = {"serviceAccountName": "of-the-job"}
ACCOUNTS: dict[str, tuple[Json, str]] = {
    "none": ({}, "finetune-spark"),
    "of all pods": ({"all": OF_THE_JOB}, "of-the-job"),
    "of the preparation": ({"all": OF_THE_JOB, "prepare": {"serviceAccountName": "mine"}}, "mine"),
    "of the template": ({"all": OF_THE_JOB, "prepare": {"template": TEAM}}, "from-template"),
    "of the training": ({"train": OF_THE_JOB}, "finetune-spark"),
    "a template that is none": ({"prepare": {"template": {"spec": "text"}}}, "finetune-spark"),
}


@pytest.mark.parametrize(("settings", "expected"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_the_account_of_the_driver(settings: Json, expected: str) -> None:
    assert executors.find_driver_account(resolved(data=data(), pods=settings)) == expected


USERS: Json = {
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "s3"}}],
    "template": {
        "metadata": {"annotations": {"team": "a"}},
        "spec": {
            "nodeSelector": {"pool": "spark"},
            "tolerations": [{"key": "spark", "operator": "Exists"}],
            "volumes": [{"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus"}}],
            "containers": [
                {
                    "name": "main",
                    "resources": {"limits": {"memory": "4Gi"}},
                    "livenessProbe": {"exec": {"command": ["true"]}},
                    "volumeMounts": [{"name": "corpus", "mountPath": "/corpus"}],
                },
            ],
            "initContainers": [{"name": "sidecar", "image": "sidecar:1", "restartPolicy": "Always"}],
        },
    },
}


def test_executors_are_like_the_driver_without_what_is_about_it() -> None:
    bodies = children(**pods(**USERS), tracking={"uri": "http://m:5000", "secretRef": {"name": "mlflow"}})
    driver, executor = bodies["Job"]["spec"]["template"], template(bodies)
    labels = {
        "finetune.dev/component": names.EXECUTOR,
        "finetune.dev/job": "tune",
        "finetune.dev/job-uid": UID,
    }
    assert labels.items() <= executor["metadata"]["labels"].items()
    assert executor["metadata"]["annotations"] == {"team": "a"}
    same = ("nodeSelector", "tolerations", "securityContext", "serviceAccountName")
    assert {name: executor["spec"][name] for name in same} == {name: driver["spec"][name] for name in same}
    assert [item["name"] for item in executor["spec"]["volumes"]] == ["tmp", "shm", "corpus"]
    [main] = executor["spec"]["containers"]
    assert executor["spec"]["initContainers"] == driver["spec"]["initContainers"]
    assert main == {
        "name": "executor",
        "image": "prep:1",
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": driver["spec"]["containers"][0]["securityContext"],
        "command": ["finetune-executor"],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "A", "value": "b"}],
        "envFrom": [{"secretRef": {"name": "s3", "optional": False}}],
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "corpus", "mountPath": "/corpus"},
        ],
    }


@pytest.mark.parametrize("mode", ["Local", "Kubernetes"])
def test_variables_and_templates_are_in_the_pods_alone(mode: str) -> None:
    canary = "canary-3f9c"
    settings = {
        "env": [{"name": "TOKEN", "value": canary}],
        "template": {"metadata": {"annotations": {"a": canary}}},
    }
    bodies = conclude(ftj(NEW, data=data(spark={"mode": mode}), **pods(**settings)), settings=SETTINGS).apply
    assert [body["kind"] for body in bodies if canary in str(body)] == ["Job"]


def test_the_kubelet_expands_nothing_in_the_template_of_executors() -> None:
    variables = [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "$$"}]
    [driver] = children(**pods(env=variables))["Job"]["spec"]["template"]["spec"]["containers"]
    [text] = [item["value"] for item in driver["env"] if item["name"] == "FINETUNE_EXECUTOR_TEMPLATE"]
    assert '"value":"$$(B)"' in text
    assert '"value":"$$$$"' in text
    assert template(children(**pods(env=variables)))["spec"]["containers"][0]["env"][1:] == variables


def test_a_template_that_is_too_long_for_a_variable_is_refused() -> None:
    variables = [{"name": f"V{number}", "value": "x" * 16_000} for number in range(7)]
    [sentence] = executors.find_oversized_template(resolved(data=data(), **pods(env=variables)))
    assert sentence.startswith("env, envFrom and template of spec.pods.prepare have 112,")
    assert sentence.endswith(
        "but executors can receive at most 100,000: move long values into a ConfigMap or a Secret that envFrom names"
    )
    assert [
        *executors.find_oversized_template(
            resolved(data=data(spark={"mode": "Local"}), **pods(env=variables))
        )
    ] == []
    assert [*executors.find_oversized_template(resolved(data=data(), **pods(env=variables[:6])))] == []
    dollars = [{"name": f"V{number}", "value": "$" * 15_000} for number in range(4)]
    [doubled] = executors.find_oversized_template(resolved(data=data(), **pods(env=dollars)))
    assert doubled.startswith("env, envFrom and template of spec.pods.prepare have 120,")


CHANGED: dict[str, tuple[str, Json, str]] = {
    "a template that is too long": (
        "Kubernetes",
        pods(template={"metadata": {"annotations": {"a": "x" * 110_000}}}),
        "env, envFrom and template of spec.pods.prepare have 110,",
    ),
    "a folder that pods no longer share": (
        "Kubernetes",
        {"data": {"output": "/splits"}},
        "data.prepare.output /splits is not on a volume",
    ),
    "a folder that the pods of a SparkApplication no longer share": (
        "SparkApplication",
        {"data": {"output": "/splits"}},
        "data.prepare.output /splits is not on a volume",
    ),
    "a container beside prep": (
        "Kubernetes",
        pods(template={"spec": {"containers": [{"name": "side", "image": "a"}]}}),
        "spec.pods.prepare.template has a second container 'side'",
    ),
}


STARTS = {"Kubernetes": "Job/tune-prep", "SparkApplication": "SparkApplication/tune-prep-1"}


@pytest.mark.parametrize(("mode", "parts", "said_of_it"), CHANGED.values(), ids=CHANGED)
def test_a_template_that_was_changed_is_read_again_before_the_preparation(
    mode: str, parts: Json, said_of_it: str
) -> None:
    accepted, spark = status(ACCEPTED, ADMITTED), {"mode": mode}
    given = parts | {"data": data(spark=spark, **parts.get("data", {}))}
    decision = conclude(ftj(accepted, **given), settings=SETTINGS)
    parsed, stalled = said(decision, ConditionType.PODS_HEALTHY), said(decision, ConditionType.STALLED)
    assert parsed
    assert stalled
    assert (applied(decision), decision.status.phase, stalled[0]) == ([], "Pending", "True")
    assert (parsed[0], parsed[1]) == ("False", ConditionReason.POD_TEMPLATE_INVALID)
    assert parsed[2].startswith(said_of_it)
    corrected = conclude(ftj(decision.status, data=data(spark=spark)), settings=SETTINGS)
    assert applied(corrected)[-1] == STARTS[mode]
    assert said(corrected, ConditionType.PODS_HEALTHY) is None


ODD: dict[str, Json] = {
    "volumes that are none": {"spec": {"volumes": ["x"], "containers": ["y"]}},
    "a container without a name": {"spec": {"containers": [{"image": "z"}]}},
}


@pytest.mark.parametrize("pod_template", ODD.values(), ids=ODD)
def test_a_template_that_fits_no_pod_is_left_for_the_api_server(pod_template: Json) -> None:
    parsed = template(children(**pods(template=pod_template)))
    assert "executor" in [item.get("name") for item in parsed["spec"]["containers"] if isinstance(item, dict)]


def mounted(path: str, volume: Json | None, container: str = "main") -> Json:
    mount = {"name": "data", "mountPath": path}
    parsed = {"containers": [{"name": container, "volumeMounts": [mount]}]}
    return {"spec": parsed | ({"volumes": [{"name": "data", **volume}]} if volume else {})}


CLAIM: Json = {"persistentVolumeClaim": {"claimName": "c"}}
FOLDERS: dict[str, tuple[Json, Json, list[str]]] = {
    "S3": (data(), {}, []),
    "Local": (data(path="/a", output="/b", spark={"mode": "Local"}), {}, []),
    "a claim": (data(path="/data/a", output="/data/b"), mounted("/data/", CLAIM), []),
    "no volume": (data(path="/a", output="/b"), {}, ["data.source.path /a", "data.prepare.output /b"]),
    "an evaluation set": (
        data(decontaminate={"sources": [{"name": "own", "type": "JSONLines", "path": "/a"}]}),
        {},
        ["data.prepare.decontaminate.sources[own].path /a"],
    ),
    "feedback": (
        {
            **data(output="/data/b"),
            "source": {
                "type": "InferenceTable",
                "path": "/data/logged",
                "feedback": {"path": "/feedback", "requestIdColumn": "id", "ratingColumn": "up"},
            },
        },
        mounted("/data", CLAIM),
        ["data.source.feedback.path /feedback"],
    ),
    "another folder": (
        data(output="/database"),
        mounted("/data", CLAIM),
        ["data.prepare.output /database"],
    ),
    "a folder of each pod": (
        data(output="/data"),
        mounted("/data", {"emptyDir": {}}),
        ["data.prepare.output /data"],
    ),
    "a volume that is not there": (
        data(output="/data"),
        mounted("/data", None),
        ["data.prepare.output /data"],
    ),
    "sources of a mix": (
        {
            **data(output="/data/b"),
            "source": {
                "type": "Mix",
                "sources": [
                    {"name": "shared", "type": "CSV", "path": "/data/a.csv"},
                    {"name": "own", "type": "CSV", "path": "/a.csv"},
                    {"name": "stored", "type": "Delta", "path": "s3://corpora/chats"},
                ],
            },
        },
        mounted("/data", CLAIM),
        ["data.source.sources[own].path /a.csv"],
    ),
    "a mount of another container": (
        data(output="/data"),
        mounted("/data", CLAIM, "sidecar"),
        ["data.prepare.output /data"],
    ),
}


@pytest.mark.parametrize(("parts", "template", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_folders_that_pods_do_not_share(parts: Json, template: Json, expected: list[str]) -> None:
    parsed = [*executors.find_unshared_folders(resolved(data=parts, **pods(template=template)))]
    ending = (
        " is not on a volume that the driver and its executors share: mount a PersistentVolumeClaim there in the "
        "container main of spec.pods.prepare.template, or create a FineTuneJob with another name and "
        "s3://bucket/folder"
    )
    assert parsed == [f"{start}{ending}" for start in expected]


def test_a_folder_of_one_pod_is_told_before_the_job_starts() -> None:
    decision = conclude(ftj(data=data(output="/out")), settings=SETTINGS)
    accepted = said(decision, ConditionType.ACCEPTED)
    assert accepted is not None
    assert accepted[:2] == ("False", ConditionReason.POD_TEMPLATE_INVALID)
    assert applied(decision) == []


def test_the_account_is_asked_about_before_the_job_starts() -> None:
    objects = conclude(ftj(data=data()), settings=SETTINGS, answer=None).dry_runs
    review = next(body for body in objects if body["kind"] == "LocalSubjectAccessReview")
    # NB: the API server refuses a review with a name.
    assert review["metadata"] == {"namespace": "team"}
    assert review["spec"] == {
        "user": "system:serviceaccount:team:finetune-spark",
        "groups": ["system:serviceaccounts", "system:serviceaccounts:team", "system:authenticated"],
        "resourceAttributes": {"namespace": "team", "verb": "create", "resource": "pods"},
    }
    local = conclude(ftj(data=data(spark={"mode": "Local"})), settings=SETTINGS, answer=None).dry_runs
    assert [body["kind"] for body in local] == ["Job", "Pod"]


def executor(number: int, phase: str = "Running", **state: Any) -> Json:
    """The pod of an executor, which the driver's pod controls."""
    parsed = pod(JOB, 0, phase, component=names.EXECUTOR, **state)
    parsed["metadata"] |= {
        "name": f"{DRIVER}-exec-{number}",
        "uid": f"uid-of-exec-{number}",
        "ownerReferences": [controller("v1", "Pod", f"uid-of-{DRIVER}")],
    }
    return parsed


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient memory.",
    "lastTransitionTime": stamped(-60),
}
WAITING: Json = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
NO_IMAGE = [{"name": "executor", "image": "prep:2", "state": WAITING}]
HEALTHY = ("True", ConditionReason.PODS_RUNNING, "no pod is blocked")

SEEN: dict[str, tuple[list[Json], dict[str, str], str, tuple[str, str, str]]] = {
    "none yet": ([], {}, "0 of 2", HEALTHY),
    "all": ([executor(1), executor(2)], {}, "2 of 2", HEALTHY),
    "one that ended": ([executor(1, "Failed"), executor(2)], {}, "1 of 2", HEALTHY),
    "no node": (
        [executor(1), executor(2, "Pending", conditions=[UNSCHEDULABLE])],
        {},
        "1 of 2",
        (
            "False",
            ConditionReason.UNSCHEDULABLE,
            f"pod {DRIVER}-exec-2 cannot be scheduled: 0/2 nodes are available: 2 Insufficient memory; add nodes, or correct "
            "spec.pods, suspend the job and resume it",
        ),
    ),
    "no image": (
        [executor(1, "Pending", node="n", containerStatuses=NO_IMAGE)],
        {},
        "0 of 2",
        (
            "False",
            ConditionReason.IMAGE_PULL_FAILED,
            f"pod {DRIVER}-exec-1 on node n cannot pull prep:2: ImagePullBackOff: not found",
        ),
    ),
    "a quota": (
        [executor(1)],
        {JOB: "1 of 2 executors cannot be created: exceeded quota"},
        "1 of 2",
        (
            "False",
            ConditionReason.POD_REJECTED,
            "1 of 2 executors cannot be created: exceeded quota",
        ),
    ),
    "one after the other": (
        [executor(11, "Pending"), executor(12, "Pending")],
        {},
        "0 of 2",
        (
            "False",
            ConditionReason.EXECUTORS_FAIL,
            "Spark has created 12 executors for 2, and none runs: executors exit soon after they start; check the image of "
            "spec.pods.prepare, and whether a NetworkPolicy blocks the driver's ports 7078 and 7079",
        ),
    ),
}


@pytest.mark.parametrize(("parsed", "rejections", "number", "healthy"), SEEN.values(), ids=SEEN)
def test_what_is_said_of_executors(
    parsed: list[Json], rejections: dict[str, str], number: str, healthy: tuple[str, str, str]
) -> None:
    driver = pod(JOB, component=names.PREP)
    observation = observed(child(JOB), pods=[driver], executors=tuple(parsed), rejections=rejections)
    decision = conclude(ftj(BEFORE, data=data()), observation, at=later(30))
    message = f"Spark is running on {number} executors; kubectl logs job/tune-prep shows its progress"
    assert said(decision, ConditionType.PREPARED) == ("False", ConditionReason.PREPARING, message)
    assert said(decision, ConditionType.PODS_HEALTHY) == healthy


def test_executors_are_those_of_the_drivers_pod() -> None:
    driver, executor_pod = pod(JOB, component=names.PREP), executor(1)
    forged = executor(2)
    forged["metadata"]["ownerReferences"] = [controller("batch/v1", "Job", f"uid-of-{DRIVER}")]
    foreign_executor = executor(3)
    foreign_executor["metadata"]["ownerReferences"] = [controller("v1", "Pod", "another")]
    assert executors.select_executors([executor_pod, forged, foreign_executor], [driver]) == [executor_pod]


def running(seconds: float) -> Json:
    """A driver whose container started so many seconds after NOW."""
    state = {"running": {"startedAt": stamped(seconds)}}
    return pod(JOB, component=names.PREP, containerStatuses=[{"name": "prep", "state": state}])


DYNAMIC: Json = {"mode": "Kubernetes", "conf": {"spark.dynamicAllocation.enabled": "true"}}
LACKS: dict[str, tuple[Json, list[Json], list[Json], tuple[int, int] | None]] = {
    "no driver": ({}, [], [], None),
    "a driver that starts": ({}, [running(15)], [], None),
    "a driver that waits": ({}, [running(5)], [executor(1)], (1, 2)),
    "one that ended": ({}, [running(5)], [executor(1), executor(2, "Failed")], (1, 2)),
    "all": ({}, [running(5)], [executor(1), executor(2)], None),
    "Spark chooses": ({"spark": DYNAMIC}, [running(5)], [], None),
}


@pytest.mark.parametrize(("prepare", "drivers", "parsed", "expected"), LACKS.values(), ids=LACKS)
def test_executors_that_do_not_exist(
    prepare: Json, drivers: list[Json], parsed: list[Json], expected: tuple[int, int] | None
) -> None:
    lacks = executors.count_missing(ftj(BEFORE, data=data(**prepare)), drivers, parsed, later(30))
    assert lacks == expected


def test_a_quota_is_tried_with_what_an_executor_requests() -> None:
    variables = {"mode": "Kubernetes", "executorCores": 4, "executorMemory": "8Gi"}
    parsed = ftj(BEFORE, data=data(spark=variables))
    bodies = executors.build_trial_pod(template(children({"spark": variables})), parsed)
    assert bodies["metadata"]["name"] == "tune-prep-executor"
    assert bodies["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
    }
