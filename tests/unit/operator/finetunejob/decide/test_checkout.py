"""Which commit a job runs, and what it waits for until that is known."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import EnsureRun
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow, ResolvedRevision
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    SETTINGS,
    conclude,
    ftj,
    observed,
    said,
    status,
)

Json = dict[str, Any]
URL = "https://git.example.com/team/code.git"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOUND = ResolvedRevision(COMMIT, branch="main")
KNOWN = CodeStatus(commit=COMMIT, branch="main")
AWAY = ResolvedRevision(
    problem=Problem(ConditionReason.GIT_UNREACHABLE, "the repository cannot be reached"), retry_seconds=4
)


def job(revision: str = "main", before: Any = None, **parts: Any) -> FineTuneJob:
    code = {"git": {"url": URL, "revision": revision}}
    job_status = status(ACCEPTED) if before is None else before
    return ftj(job_status, **{"trainer": {"command": ["torchrun", "train.py"], "code": code}, **parts})


RESOLVED: dict[str, tuple[FineTuneJob, ResolvedRevision | None, CodeStatus, str]] = {
    "a branch": (
        job(),
        FOUND,
        KNOWN,
        f"main of {URL} is commit {COMMIT}, which every attempt runs",
    ),
    "a tag": (
        job("v1"),
        ResolvedRevision(COMMIT),
        CodeStatus(commit=COMMIT),
        f"v1 of {URL} is commit {COMMIT}, which every attempt runs",
    ),
    "a commit, which nobody is asked about": (
        job(COMMIT.upper()),
        None,
        CodeStatus(commit=COMMIT),
        f"{URL} has commit {COMMIT}, which every attempt runs",
    ),
}


@pytest.mark.parametrize(("finetunejob", "revision", "expected", "message"), RESOLVED.values(), ids=RESOLVED)
def test_nothing_is_made_before_the_commit_is_in_the_status(
    finetunejob: FineTuneJob, revision: ResolvedRevision | None, expected: CodeStatus, message: str
) -> None:
    decision = conclude(finetunejob, observed(mlflow=Mlflow(), code=revision), settings=SETTINGS)
    assert decision.status.code == expected
    assert said(decision, ConditionType.CODE_RESOLVED) == ("True", ConditionReason.CODE_RESOLVED, message)
    assert (decision.apply, decision.actions, decision.dry_runs) == ((), (), ())
    assert decision.requeue_seconds == 0.1


def test_a_commit_that_is_known_stays() -> None:
    moved = ResolvedRevision("f" * 40, branch="main")
    decision = conclude(
        job(before=status(ACCEPTED, ADMITTED, code=KNOWN)),
        observed(mlflow=Mlflow(), code=moved),
        settings=SETTINGS,
    )
    assert decision.status.code == KNOWN
    (run,) = decision.actions
    assert isinstance(run, EnsureRun)
    assert {key: value for key, value in run.tags.items() if key.startswith("mlflow.")} == {
        "mlflow.source.git.commit": COMMIT,
        "mlflow.source.git.branch": "main",
        "mlflow.source.git.repoURL": URL,
    }


def test_until_then_the_job_says_what_it_waits_for() -> None:
    decision = conclude(job(), observed(mlflow=Mlflow(), code=AWAY), settings=SETTINGS)
    why = (ConditionReason.GIT_UNREACHABLE, "the repository cannot be reached")
    assert said(decision, ConditionType.READY) == ("False", *why)
    assert said(decision, ConditionType.RECONCILING) == ("True", *why)
    assert (decision.apply, decision.actions, decision.requeue_seconds) == ((), (), 4)


def test_the_pass_that_accepts_the_job_has_the_server_asked_at_once() -> None:
    decision = conclude(job(before=status()), observed(mlflow=Mlflow()), settings=SETTINGS)
    assert (decision.apply, decision.actions, decision.requeue_seconds) == ((), (), 0.1)
    waiting = conclude(job(), observed(mlflow=Mlflow()), settings=SETTINGS)
    assert (waiting.apply, waiting.actions, waiting.requeue_seconds) == ((), (), 15)


def test_a_suspended_job_says_that_it_is_and_has_no_run_yet() -> None:
    decision = conclude(job(suspend=True), observed(mlflow=Mlflow(), code=AWAY), settings=SETTINGS)
    assert decision.status.phase == "Suspended"
    assert decision.actions == ()


@pytest.mark.parametrize("revision", [None, AWAY], ids=["nobody has answered yet", "the server is away"])
def test_a_job_that_is_resumed_waits_for_its_commit(revision: ResolvedRevision | None) -> None:
    paused = conclude(job(suspend=True), observed(mlflow=Mlflow(), code=revision), settings=SETTINGS)
    assert paused.status.phase == "Suspended"
    decision = conclude(job(before=paused.status), observed(mlflow=Mlflow(), code=AWAY), settings=SETTINGS)
    assert (decision.status.phase, decision.status.suspend_time) == ("Pending", None)
    assert said(decision, ConditionType.SUSPENDED) == ("False", ConditionReason.RESUMED, "the job goes on")
    assert said(decision, ConditionType.READY) == (
        "False",
        ConditionReason.GIT_UNREACHABLE,
        "the repository cannot be reached",
    )
