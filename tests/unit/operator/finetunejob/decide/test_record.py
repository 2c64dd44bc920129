"""The status records the uids of the current Jobs, and keeps them when the Jobs are gone."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.status import FineTuneJobStatus, JobUids
from fixtures.operator_in_memory.decisions import child, conclude, ftj, observed, running, status

PREP, FIRST, SECOND = child("tune-prep"), child("tune-train-1"), child("tune-train-2")
OF_PREP, OF_FIRST, OF_SECOND = "uid-of-tune-prep", "uid-of-tune-train-1", "uid-of-tune-train-2"

CASES: dict[str, tuple[FineTuneJobStatus, list[dict[str, Any]], JobUids | None]] = {
    "no Job": (status(), [], None),
    "the preparation": (status(), [PREP], JobUids(prep=OF_PREP)),
    "the first attempt": (running(), [PREP, FIRST], JobUids(prep=OF_PREP, train=OF_FIRST, train_attempt=1)),
    "a Job whose creation the status does not tell of": (
        status(),
        [FIRST],
        JobUids(train=OF_FIRST, train_attempt=1),
    ),
    "the evaluation": (
        running(jobs=JobUids(train=OF_FIRST)),
        [child("tune-evaluate")],
        JobUids(train=OF_FIRST, evaluate="uid-of-tune-evaluate"),
    ),
    "the second attempt": (
        running(attempt=2, jobs=JobUids(train=OF_FIRST, train_attempt=1)),
        [FIRST, SECOND],
        JobUids(train=OF_SECOND, train_attempt=2),
    ),
    "the second attempt does not exist yet": (
        running(attempt=2, jobs=JobUids(train=OF_FIRST, train_attempt=1)),
        [],
        JobUids(train=OF_FIRST, train_attempt=1),
    ),
    "the Jobs are gone": (
        running(jobs=JobUids(prep=OF_PREP, train=OF_FIRST)),
        [],
        JobUids(prep=OF_PREP, train=OF_FIRST),
    ),
    "the Job was made again": (
        running(jobs=JobUids(train=OF_FIRST)),
        [child("tune-train-1", uid="new")],
        JobUids(train="new", train_attempt=1),
    ),
}


@pytest.mark.parametrize(("before", "jobs", "expected"), CASES.values(), ids=CASES)
def test_record(before: FineTuneJobStatus, jobs: list[dict[str, Any]], expected: JobUids | None) -> None:
    assert conclude(ftj(before), observed(*jobs)).status.jobs == expected
