"""The result of a gate's Job that has ended: its outcome and its numbers, from the Job, its last pod and its MLflow run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from finetune_crds.base import Json
from finetune_crds.gates import DEFAULT_TIMEOUT_SECONDS, JobGate
from finetune_crds.promotion_status import MAX_GATE_MESSAGE, MAX_GATE_NUMBERS, GateResult
from finetune_operator.batch.state import describe_pods, job_condition
from finetune_operator.modelpromotion.decide.job_end import (
    build_log_command,
    describe_exit,
    describe_failure,
    find_last_pod,
    find_termination,
    has_exceeded_deadline,
    quote_end,
)
from finetune_operator.modelpromotion.model import ObservedJob
from finetune_operator.text import shorten

# NB: names of metrics from MLflow can be any text.
_MAX_NAME_CHARS = 253
_NOT_NUMBERS = "its termination message is not a JSON object of numbers"


class _Ending(NamedTuple):
    """How a Job ended, without its numbers."""

    outcome: Literal["Succeeded", "Failed", "NotStarted"]
    message: str = ""


def build_result(
    job: ObservedJob,
    gate: JobGate,
    *,
    version: str,
    digest: str,
    used_numbers: Collection[str],
    now: datetime,
) -> GateResult:
    """Return the result of a Job that is complete or failed.

    Args:
        used_numbers: names of the numbers that gates use; they are kept before all others.
    """
    is_complete = job_condition(job.body, "Complete") is not None
    pod = find_last_pod(job.pods)
    numbers: dict[str, str] = {}
    if is_complete:
        reported, problem = _parse_numbers(find_termination(pod).get("message") or "")
        logged = {name: repr(value) for name, value in (job.run.metrics if job.run else {}).items()}
        numbers = _bound_numbers(logged | reported, used_numbers)
        ending = _Ending("Succeeded", problem)
    else:
        ending = _explain_failure(job, pod, gate)
    return GateResult(
        version=version,
        digest=digest,
        job=job.name,
        outcome=ending.outcome,
        metrics=numbers,
        message=ending.message[:MAX_GATE_MESSAGE],
        run_id=job.run.run_id if job.run else None,
        time=now,
    )


def _parse_numbers(text: str) -> tuple[dict[str, str], str]:
    """The numbers of a termination message as text, and why there are none; both are empty for an empty message."""
    if not text.strip():
        return {}, ""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}, f"{_NOT_NUMBERS}: {shorten(text)!r}"
    if not isinstance(content, dict):
        return {}, f"{_NOT_NUMBERS}: {shorten(text)!r}"
    # NB: in Python, a bool is an int.
    wrong = [
        name
        for name, value in content.items()
        if isinstance(value, bool) or not isinstance(value, int | float)
    ]
    if wrong:
        return {}, f"{_NOT_NUMBERS}: {shorten(wrong[0])!r} is {shorten(repr(content[wrong[0]]))}"
    return {name: _format(value) for name, value in content.items()}, ""


def _format(value: float) -> str:
    """A number as text. NB: JSON allows integers of any length, and a float has at most 24 characters."""
    try:
        return repr(float(value))
    except OverflowError:
        return "inf" if value > 0 else "-inf"


def _bound_numbers(numbers: Mapping[str, str], used_numbers: Collection[str]) -> dict[str, str]:
    """At most MAX_GATE_NUMBERS numbers: those that gates use, and then the others by name."""
    valid = [name for name in numbers if 0 < len(name) <= _MAX_NAME_CHARS]
    first = sorted(valid, key=lambda name: (name not in used_numbers, name))[:MAX_GATE_NUMBERS]
    return {name: numbers[name] for name in sorted(first)}


def _explain_failure(job: ObservedJob, pod: Json, gate: JobGate) -> _Ending:
    """Explain why a Job failed: its time limit, the end of its log, or what the Job controller reports."""
    log, terminated = f"see {build_log_command(job)}", find_termination(pod)
    if has_exceeded_deadline(pod):
        limit = f"{gate.timeout_seconds or DEFAULT_TIMEOUT_SECONDS} s (timeoutSeconds)"
        where = describe_pods([pod])
        if not terminated.get("startedAt"):
            return _Ending(
                "NotStarted",
                f"Job {job.name}: the container of {where} did not start within {limit}: correct the image or the template of the gate",
            )
        return _Ending("Failed", f"Job {job.name} did not end within {limit}: {log}")
    if terminated:
        return _Ending(
            "Failed", f"Job {job.name} failed ({describe_exit(terminated)}), {log}{quote_end(terminated)}"
        )
    return _Ending("Failed", f"Job {job.name} failed: {describe_failure(job, pod)}")
