"""How a Job of a promotion ended, as its pods and the Job controller say."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.pods import MAIN_CONTAINER
from finetune_operator.batch.state import job_condition
from finetune_operator.modelpromotion.model import ObservedJob
from finetune_operator.text import keep_last_lines


def find_last_pod(pods: Sequence[Json]) -> Json:
    """The pod that started last; {} if no pod exists any more."""
    return max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default={})


def find_termination(pod: Json, container: str = MAIN_CONTAINER) -> Json:
    """How a container of a pod ended; {} if it did not run."""
    status = pod.get("status", {})
    for item in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if item["name"] == container:
            return dict(item.get("state", {}).get("terminated") or {})
    return {}


def has_exceeded_deadline(pod: Json) -> bool:
    """Whether Kubernetes ended the pod because its time was over."""
    return bool(pod.get("status", {}).get("reason") == "DeadlineExceeded")


def describe_exit(terminated: Json) -> str:
    """The exit code of a container that failed, and the reason if there is more than that it failed."""
    reason = terminated.get("reason") or "Error"
    return f"exit code {terminated.get('exitCode')}" + (f", {reason}" if reason != "Error" else "")


def quote_end(terminated: Json) -> str:
    """The end of a container's log for the end of a sentence; empty without a log."""
    last_lines = keep_last_lines(terminated.get("message") or "")
    return f": {last_lines}" if last_lines else ""


def describe_failure(job: ObservedJob, pod: Json) -> str:
    """Why a Job failed of whose containers none says why."""
    failed = job_condition(job.body, "Failed") or {}
    message = pod.get("status", {}).get("message") or failed.get("message")
    return str(message or failed.get("reason") or "no reason is known")


def build_log_command(job: ObservedJob, options: str = "") -> str:
    """The command that prints the log of a Job's pod. `options`: of the command, after a space."""
    return f"kubectl logs -n {job.body['metadata']['namespace']} job/{job.name}{options}"
