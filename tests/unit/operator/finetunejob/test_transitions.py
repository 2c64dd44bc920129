"""What a written status adds to the counters."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from finetune_crds.status import AttemptCause, EndedAttempt, FineTuneJobStatus, Nodes
from finetune_crds.status_parts import JobUsage, Usage
from finetune_operator.finetunejob.transitions import count_transitions
from fixtures.operator_in_memory.decisions import NOW, ftj, later
from support.counted import Samples, counted


def status(**fields: Any) -> FineTuneJobStatus:
    return FineTuneJobStatus(**fields)


def training(since: datetime | None = NOW, **fields: Any) -> FineTuneJobStatus:
    return status(phase="Training", phase_time=since, attempt=1, **fields)


def ended_attempt(number: int, cause: AttemptCause | None, *, at: float = 0) -> EndedAttempt:
    return EndedAttempt(attempt=number, end_time=later(at), cause=cause)


def usage(**seconds: tuple[int, int]) -> Usage:
    """The seconds of pods and of GPUs, by the uid of the Job."""
    entries = [
        JobUsage(uid=uid, pod_seconds=pods, gpu_seconds=gpus, counted_until=NOW)
        for uid, (pods, gpus) in seconds.items()
    ]
    return Usage(jobs=entries)


ENDED = {"productive_seconds": 1000, "nodes": Nodes(desired=2)}
# The status before and after a write 60 s after NOW, and what it adds.
CASES: dict[str, tuple[FineTuneJobStatus, FineTuneJobStatus, Samples]] = {
    "nothing new": (training(), training(), {}),
    "the first status of a job that waits": (status(), status(phase="Pending", phase_time=NOW), {}),
    "a job that starts at once": (
        status(),
        status(phase="Preparing"),
        {"job_phase_seconds_count Pending": 1, "job_phase_seconds_sum Pending": 100},
    ),
    "another phase": (
        training(),
        status(phase="Registering"),
        {"job_phase_seconds_count Training": 1, "job_phase_seconds_sum Training": 60},
    ),
    "a phase whose start is unknown": (training(None), status(phase="Registering"), {}),
    "a clock that was set back": (
        training(later(90)),
        status(phase="Registering"),
        {"job_phase_seconds_count Training": 1},
    ),
    "a restart": (
        training(),
        training().model_copy(update={"attempt": 2, "attempts": [ended_attempt(1, "NodeLost")]}),
        {"job_restarts_total NodeLost": 1},
    ),
    "the second restart": (
        training(attempts=[ended_attempt(1, "NodeLost")]),
        training().model_copy(
            update={"attempt": 3, "attempts": [ended_attempt(1, "NodeLost"), ended_attempt(2, "Failed")]}
        ),
        {"job_restarts_total Failed": 1},
    ),
    "an attempt that Kueue evicted again": (
        training(attempts=[ended_attempt(1, "Preempted")]),
        status(
            phase="Queued",
            attempt=1,
            attempts=[ended_attempt(1, "Preempted"), ended_attempt(1, "Preempted", at=30)],
        ),
        {
            "job_phase_seconds_count Training": 1,
            "job_phase_seconds_sum Training": 60,
            "job_restarts_total Preempted": 1,
        },
    ),
    "an attempt that an earlier version recorded": (
        training(),
        training().model_copy(update={"attempt": 2, "attempts": [ended_attempt(1, None)]}),
        {},
    ),
    "the last failure": (
        training(None),
        status(phase="Failed", attempt=1, attempts=[ended_attempt(1, "Fatal")]),
        {"jobs_finished_total Failed": 1},
    ),
    "usage": (
        training(usage=usage(a=(100, 800))),
        training(usage=usage(a=(160, 1280), b=(10, 0))),
        {"pod_seconds_total team": 70, "gpu_seconds_total team": 480},
    ),
    "usage of ended Jobs that is summed up": (
        training(usage=usage(a=(100, 800), b=(10, 0))),
        training(usage=usage(earlier=(110, 800))),
        {},
    ),
    "the end": (
        training(None, usage=usage(a=(4000, 0))),
        status(phase="Succeeded", usage=usage(a=(4000, 0)), **ENDED),
        {
            "jobs_finished_total Succeeded": 1,
            "finished_pod_seconds_total team": 4000,
            "useful_pod_seconds_total team": 2000,
        },
    ),
    "the end, by clocks that differ": (
        training(None, usage=usage(a=(1999, 0))),
        status(phase="Succeeded", usage=usage(a=(1999, 0)), **ENDED),
        {
            "jobs_finished_total Succeeded": 1,
            "finished_pod_seconds_total team": 1999,
            "useful_pod_seconds_total team": 1999,
        },
    ),
    "the end of a script that reports no productive time": (
        training(None, usage=usage(a=(4000, 0))),
        status(phase="Succeeded", usage=usage(a=(4000, 0))),
        {"jobs_finished_total Succeeded": 1},
    ),
    "a finished job that is cleaned up": (
        status(phase="Succeeded", phase_time=NOW, usage=usage(a=(4000, 0)), **ENDED),
        status(phase="Succeeded", phase_time=NOW, usage=usage(a=(4000, 0)), completion_time=NOW, **ENDED),
        {},
    ),
}


@pytest.mark.parametrize(("before", "after", "expected"), CASES.values(), ids=CASES)
def test_a_written_status_is_counted(
    before: FineTuneJobStatus, after: FineTuneJobStatus, expected: Samples
) -> None:
    job = replace(ftj(before), created=later(-40))
    with counted() as changes:
        count_transitions(job, after, later(60))
    assert changes == expected
