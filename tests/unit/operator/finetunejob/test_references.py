"""What a job refers to and does not know yet: versions of aliases, a commit, the checkpoints of another job."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.status import FineTuneJobStatus, Pinned, ResumedFrom
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.references import (
    aliases_to_resolve,
    repository_to_resolve,
    resumed_job_name,
)
from finetune_operator.finetunejob.resolve import pinned
from fixtures.operator_in_memory.decisions import ACCEPTED, ADMITTED, FAILED, ftj, running, status

Json = dict[str, Any]
TEACHER: Json = {"type": "Distillation", "distillation": {"teacher": "models:/ml.prod.large@champion"}}
ACCEPTED_AND_ADMITTED = status(ACCEPTED, ADMITTED)


def from_alias(job_status: FineTuneJobStatus = ACCEPTED_AND_ADMITTED, **parts: Any) -> FineTuneJob:
    """A job whose base is an alias, as it is read."""
    job = ftj(job_status, **{"model": {"base": "models:/support@champion"}, **parts})
    assert job.spec
    return dataclasses.replace(job, spec=pinned(job.spec, job.status.pinned))


ALIASES: dict[str, tuple[FineTuneJob, set[str]]] = {
    "a base": (from_alias(), {"base"}),
    "both": (from_alias(objective=TEACHER), {"base", "teacher"}),
    "a teacher": (ftj(ACCEPTED_AND_ADMITTED, objective=TEACHER), {"teacher"}),
    "a version": (from_alias(model={"base": "models:/support/3"}), set()),
    "a base that is known": (
        from_alias(status(ACCEPTED, ADMITTED, pinned=Pinned(base="models:/support/3"))),
        set(),
    ),
    "suspended": (from_alias(suspend=True), set()),
    "one that was not accepted": (from_alias(status(ADMITTED)), set()),
    "one that an earlier operator started": (from_alias(running()), set()),
    "one that failed": (from_alias(status(FAILED)), set()),
}


@pytest.mark.parametrize(("job", "fields"), ALIASES.values(), ids=ALIASES)
def test_which_aliases_are_resolved(job: FineTuneJob, fields: set[str]) -> None:
    assert set(aliases_to_resolve(job)) == fields


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def from_repository(revision: str = "main", job_status: FineTuneJobStatus | None = None) -> FineTuneJob:
    git = {"url": "https://git.example.com/team/code.git", "revision": revision}
    return ftj(job_status or status(ACCEPTED), trainer={"command": ["python", "t.py"], "code": {"git": git}})


REPOSITORIES: dict[str, tuple[FineTuneJob, bool]] = {
    "a branch": (from_repository(), True),
    "a commit": (from_repository(COMMIT), False),
    "a commit that is cut off": (from_repository(COMMIT[:12]), True),
    "it is known": (
        from_repository(job_status=status(ACCEPTED, code=CodeStatus(commit=COMMIT))),
        False,
    ),
    "a job that is not accepted": (from_repository(job_status=status()), False),
    "a job that failed": (from_repository(job_status=status(ACCEPTED, FAILED)), False),
    "no repository": (ftj(), False),
}


@pytest.mark.parametrize(("job", "expected"), REPOSITORIES.values(), ids=REPOSITORIES)
def test_which_repositories_are_resolved(job: FineTuneJob, expected: bool) -> None:
    assert (repository_to_resolve(job) is not None) == expected


FOLDER = "/checkpoints/finetune/team/first-u1"


def resumed(job_status: FineTuneJobStatus | None = None, *, uri: str = "", **parts: Any) -> FineTuneJob:
    reference = {"type": "Uri", "uri": uri} if uri else {"type": "Job", "name": "first"}
    checkpoint = {"uri": "/checkpoints", "resumeFrom": reference}
    return ftj(job_status or status(ADMITTED), checkpoint=checkpoint, **parts)


RESUMED: dict[str, tuple[FineTuneJob, str | None]] = {
    "a job": (resumed(), "first"),
    "known already": (resumed(status(ADMITTED, resumed_from=ResumedFrom(uri=FOLDER, job="first"))), None),
    "a place": (resumed(uri=FOLDER), None),
    "nothing": (ftj(status(ADMITTED)), None),
    "suspended": (resumed(suspend=True), None),
    "being deleted": (dataclasses.replace(resumed(), deleting=True), None),
    "without a spec": (dataclasses.replace(resumed(), spec=None), None),
    "after its end": (resumed(status(FAILED)), None),
}


@pytest.mark.parametrize(("job", "name"), RESUMED.values(), ids=RESUMED)
def test_which_job_is_waited_for(job: FineTuneJob, name: str | None) -> None:
    assert resumed_job_name(job) == name
