"""The Jobs of a promotion that have no result yet: what they do, and what keeps them from running."""

from __future__ import annotations

from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator.batch.blockage import find_waiting_container, unschedulable_condition
from finetune_operator.batch.state import has_ended, is_alive, is_being_deleted, job_condition
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.job_end import build_log_command
from finetune_operator.modelpromotion.model import CloseRun, ObservedJob, StopJob
from finetune_operator.text import shorten


class Unfinished(NamedTuple):
    """A Job without a result, in a sentence, and whether a result will come without anyone's help, as far as is known."""

    message: str
    is_in_progress: bool


def find_job(draft: Draft, name: str) -> ObservedJob | None:
    """The Job with this name; None if it does not exist."""
    return next((job for job in draft.observed.child_jobs if job.name == name), None)


def is_conclusive(job: ObservedJob) -> bool:
    """Whether a Job has ended. A Job that is being deleted may have failed because of the deletion."""
    is_complete = job_condition(job.body, "Complete") is not None
    return is_complete or (has_ended(job.body) and not is_being_deleted(job.body))


def stop_all(draft: Draft) -> None:
    """Stop all Jobs that run."""
    draft.actions += [
        StopJob(job.name, job.uid, job.run_id)
        for job in draft.observed.child_jobs
        if not has_ended(job.body) and not is_being_deleted(job.body)
    ]


def close_run(draft: Draft, job: ObservedJob) -> bool:
    """Close the MLflow run of a Job that has ended. Returns whether it was open."""
    if job.run is None or job.run.status != "RUNNING":
        return False
    status = "FINISHED" if job_condition(job.body, "Complete") else "FAILED"
    draft.actions.append(CloseRun(job.run.run_id, status, job.component))
    return True


def describe_unfinished(job: ObservedJob, what: str, *, log_options: str = "") -> Unfinished:
    """What a Job without a result does, or what keeps it from running.

    Args:
        what: the Job and its purpose, as the sentence begins.
        log_options: options of the command for its log.
    """
    obstacle = job.rejection or _find_obstacle(job.pods)
    if is_being_deleted(job.body):
        return Unfinished(f"{what} is being deleted, and is created again then", is_in_progress=True)
    if has_ended(job.body):
        return Unfinished(f"{what} has ended, and its result is being read", is_in_progress=True)
    if job.body["spec"].get("suspend"):
        return Unfinished(f"{what} was suspended, for example by Kueue: resume it", is_in_progress=False)
    if obstacle:
        return Unfinished(f"{what} cannot run: {obstacle}", is_in_progress=False)
    failed = job.body.get("status", {}).get("failed") or 0
    again = f" again after {failed} failed {'pod' if failed == 1 else 'pods'}" if failed else ""
    is_running = any(_has_running_container(pod) for pod in job.pods)
    state = "runs" if is_running else "starts"
    log = f": see {build_log_command(job, log_options)}" if is_running else ""
    return Unfinished(f"{what} {state}{again}{log}", is_in_progress=True)


def _has_running_container(pod: Json) -> bool:
    """Whether a pod runs, or one of its init containers does."""
    status = pod.get("status", {})
    init_containers = status.get("initContainerStatuses") or []
    return status.get("phase") == "Running" or any(
        item.get("state", {}).get("running") is not None for item in init_containers
    )


def _find_obstacle(pods: tuple[Json, ...]) -> str | None:
    """What keeps a pod from running, as far as its own status says; None if nothing does."""
    for pod in pods:
        if not is_alive(pod):
            continue
        blockage, unscheduled = find_waiting_container(pod), unschedulable_condition(pod)
        if blockage:
            return shorten(blockage.message)
        if unscheduled:
            return shorten(
                f"pod {pod['metadata']['name']} cannot be scheduled: {unscheduled.get('message', '')}"
            )
    return None
