"""Small builders of what `decide` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.contract import TerminationMessage
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.decide import decide
from finetune_operator.finetunejob.model import Decision, DryRunAnswer, FineTuneJob, Mlflow, Observed
from finetune_operator.finetunejob.pods import gang
from finetune_operator.finetunejob.resolve import resolve
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.settings import Settings

Json = dict[str, Any]

NOW = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(prep_image="prep:1", trainer_image="trainer:1", tracking_uri="http://mlflow:5000")
NO_MLFLOW = Settings(prep_image="prep:1", trainer_image="trainer:1")
UID = "0f1e2d3c-0000-4000-8000-000000000001"

SOURCE: Json = {
    "source": {"type": "Parquet", "path": "/data/corpus"},
    "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
    "prepare": {"output": "/data/splits"},
}
SPLITS: Json = {
    "splits": {"type": "Delta", "path": "/data/splits", "version": 3},
    "columns": {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
}


def later(seconds: float) -> datetime:
    """So many seconds after NOW."""
    return NOW + timedelta(seconds=seconds)


def spec(**parts: Any) -> FineTuneJobSpec:
    """A spec with given splits on two nodes of two ranks; parts replaced, or left out with None."""
    body = {"model": {"base": "/models/base"}, "data": SPLITS, "distributed": NODES} | parts
    return FineTuneJobSpec.model_validate({name: part for name, part in body.items() if part is not None})


NODES: Json = {"nodes": 2, "processesPerNode": 2}


def ftj(
    status: FineTuneJobStatus | None = None, *, defaults: Defaults | None = None, **parts: Any
) -> FineTuneJob:
    """The FineTuneJob team/tune in an installation with these defaults."""
    written = spec(**parts)
    return FineTuneJob(
        name="tune",
        namespace="team",
        uid=UID,
        version="1",
        generation=1,
        spec=resolve(
            written,
            namespace="team",
            name="tune",
            earlier=status.resolved if status else None,
            defaults=defaults or Defaults(),
        ),
        status=status or FineTuneJobStatus(),
        written=written,
    )


def condition(
    kind: ConditionType,
    status: str,
    reason: ConditionReason,
    message: str = "said before",
    *,
    since: datetime = NOW,
) -> Condition:
    """A condition that was written before."""
    return Condition.model_validate(
        {
            "type": kind.value,
            "status": status,
            "reason": reason.value,
            "message": message,
            "observedGeneration": 1,
            "lastTransitionTime": since,
        }
    )


ACCEPTED = condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED)
ADMITTED = condition(ConditionType.PODS_ADMITTED, "True", ConditionReason.PODS_ADMITTED)
PREPARED = condition(ConditionType.PREPARED, "True", ConditionReason.SPLITS_GIVEN)
TRAINING = condition(ConditionType.TRAINED, "False", ConditionReason.TRAINING)
TRAINED = condition(ConditionType.TRAINED, "True", ConditionReason.TRAINED)
EVALUATED = condition(ConditionType.EVALUATED, "True", ConditionReason.EVALUATED)
REGISTERED = condition(ConditionType.REGISTERED, "True", ConditionReason.REGISTERED)
SUCCEEDED = condition(ConditionType.SUCCEEDED, "True", ConditionReason.SUCCEEDED)
FAILED = condition(ConditionType.FAILED, "True", ConditionReason.DEADLINE_EXCEEDED)


def status(*conditions: Condition, **fields: Any) -> FineTuneJobStatus:
    """A status that was written before."""
    return FineTuneJobStatus(conditions=list(conditions), **fields)


def running(**fields: Any) -> FineTuneJobStatus:
    """The status of a job whose first attempt trains."""
    first_attempt: Json = {"attempt": 1, "restarts": 0, "start_time": NOW}
    return status(ACCEPTED, PREPARED, TRAINING, **(first_attempt | fields))


def controller(version: str, kind: str, uid: str) -> Json:
    """The ownerReference of the object that controls another one."""
    return {"apiVersion": version, "kind": kind, "name": "its-name", "uid": uid, "controller": True}


def component(job_name: str) -> str:
    """The component of a child Job."""
    return {"tune-prep": names.PREP, "tune-evaluate": names.EVALUATE}.get(job_name, names.TRAIN)


def child(
    name: str,
    ended: str = "",
    message: str = "",
    *,
    uid: str = "",
    lived: float | None = None,
    fatal: Sequence[int] = (64, 65),
    **meta: Any,
) -> Json:
    """A batch Job; `ended` is the condition that is True: Complete, Failed, FailureTarget.

    lived: seconds between NOW and its end. fatal: the fatal exit codes that it was made with.
    """
    conditions = [{"type": ended, "status": "True", "reason": "R", "message": message}] if ended else []
    status: Json = {"conditions": conditions}
    if lived is not None:
        status["startTime"] = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions[0]["lastTransitionTime"] = later(lived).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": uid or f"uid-of-{name}",
            "labels": {names.LABEL_COMPONENT: component(name)},
            "ownerReferences": [controller(API_VERSION, "FineTuneJob", UID)],
            **meta,
        },
        "spec": {"parallelism": 2, "podFailurePolicy": {"rules": gang.failure_rules(list(fatal))}},
        "status": status,
    }


def pod(
    job_name: str,
    index: int = 0,
    phase: str = "Running",
    *,
    owner: str = "",
    component: str = names.TRAIN,
    ready: bool | None = None,
    node: str = "",
    gpus: int = 0,
    **state: Any,
) -> Json:
    """A pod of a child Job. `state`: more of its status."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {"name": "trainer", "resources": {"limits": {"memory": "1Gi", **limits}}}
    is_ready = phase == "Running" if ready is None else ready
    status: Json = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": str(is_ready)}, *state.pop("conditions", [])],
    }
    return {
        "metadata": {
            "name": f"{job_name}-{index}-abcde",
            "namespace": "team",
            "uid": f"uid-of-{job_name}-{index}-abcde",
            "ownerReferences": [controller("batch/v1", "Job", owner or f"uid-of-{job_name}")],
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "labels": {
                names.LABEL_UID: UID,
                names.LABEL_COMPONENT: component,
                "batch.kubernetes.io/controller-uid": owner or f"uid-of-{job_name}",
            },
        },
        "spec": {"containers": [container], **({"nodeName": node} if node else {})},
        "status": status | state,
    }


def stamped(seconds: float) -> str:
    """So many seconds after NOW, as Kubernetes writes it."""
    return later(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(
    job_name: str,
    index: int,
    code: int,
    message: TerminationMessage | str = "",
    *,
    container: str = "trainer",
    at: int = 0,
    reason: str = "",
    **more: Any,
) -> Json:
    """A pod whose main container ended with this code, `at` seconds after NOW."""
    terminated = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "finishedAt": later(at).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "message": message.dump() if isinstance(message, TerminationMessage) else message,
    }
    phase = "Failed" if code else "Succeeded"
    statuses = [{"name": container, "state": {"terminated": terminated}}]
    return pod(job_name, index, phase, containerStatuses=statuses, **more)


EVICTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]


def observed(
    *jobs: Json, pods: list[Json] | None = None, mlflow: Mlflow | None = None, **more: Any
) -> Observed:
    """What exists."""
    by_name = {item["metadata"]["name"]: item for item in jobs}
    return Observed(jobs=by_name, pods=tuple(pods or ()), mlflow=mlflow, **more)


def tracked(
    version: RegisteredVersion | None = None,
    *,
    state: str = "RUNNING",
    metrics: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    **more: float,
) -> Mlflow:
    """MLflow knows the run r1, with these metrics and tags."""
    run = Run(run_id="r1", experiment_id="e1", status=state, metrics=(metrics or {}) | more, tags=tags or {})
    return Mlflow(run=run, version=version)


FINE = DryRunAnswer(admitted=True, reason=ConditionReason.PODS_ADMITTED, message="they would be created")


def conclude(
    ftj: FineTuneJob,
    observation: Observed | None = None,
    *,
    at: datetime = NOW,
    settings: Settings = NO_MLFLOW,
    answer: DryRunAnswer | None = FINE,
) -> Decision:
    """The decision; by default there is no MLflow, so that training needs no run, and where there is one, it has the run.

    answer: what the API server says to dry runs; None: they are still to come.
    """
    if observation is None:
        observation = observed(mlflow=tracked() if settings.tracking_uri else None)
    return decide(ftj, replace(observation, dry_run_answer=answer), at, settings)


CORRECTED = "; this job has finished: apply the corrected job under another name, or delete this job first"
"""What follows the message of a failure that a correction of the spec or of the data ends."""


def said(decision: Decision, kind: ConditionType) -> tuple[str, str, str] | None:
    """Status, reason and message of a condition."""
    for item in decision.status.conditions:
        if item.type == kind:
            return item.status, item.reason, item.message
    return None


def failure_of(decision: Decision) -> tuple[str, str, str] | None:
    """Status, reason and message of Failed, without how to apply a corrected job."""
    failed = said(decision, ConditionType.FAILED)
    return (*failed[:2], failed[2].removesuffix(CORRECTED)) if failed else None


def applied(decision: Decision) -> list[str]:
    """The children that are to be made, as kind/name."""
    return [f"{body['kind']}/{body['metadata']['name']}" for body in decision.apply]


def deleted(decision: Decision) -> list[str]:
    """The child Jobs that are to be deleted."""
    return [item.name for item in decision.delete]
