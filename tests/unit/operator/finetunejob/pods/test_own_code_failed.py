"""What follows where the code of a command of your own cannot be fetched, or its packages cannot be installed."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.controller.events import EventTarget, build_event, find_changes
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    NEXT_JOB,
    NOW,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
)

Json = dict[str, Any]
SETTINGS = Settings(trainer_image="trainer:1")
CODE: Json = {"git": {"url": "https://git.example.com/team/code.git"}, "mountPath": "/code"}
JOB = "tune-train-1"
POD = f"{JOB}-0-abcde"


def trainer(**parts: Any) -> Json:
    return {"command": ["torchrun", "train.py"], **parts}


def job(current: FineTuneJobStatus, **policy: Any) -> FineTuneJob:
    """A job with code of a repository and packages, whose commit is known."""
    with_code = current.model_copy(update={"code": CodeStatus(commit="0" * 40)})
    return ftj(with_code, trainer=trainer(code=CODE, dependencies=["trl>=99"]), runPolicy=policy)


REASONS = {"checkout": "CheckoutFailed", "dependencies": "DependenciesFailed"}
WHY = "the index has no trl>=99"


def failed(
    code: int,
    container: str = "dependencies",
    *,
    job: str = JOB,
    text: str | None = None,
    reason: str = "Error",
) -> Json:
    """A pod whose init container ended with this code; `text`: its message, by default why, and with the reason of the step."""
    error = PodError(reason=REASONS.get(container, "DependenciesFailed"), message=WHY)
    message = TerminationMessage(error=error).dump() if text is None else text
    at = "2026-08-01T12:00:10Z"
    ended = {"exitCode": code, "message": message, "finishedAt": at, "reason": reason}
    status = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": container, "state": {"terminated": ended}}],
    }
    return pod(job, 0) | {"status": status}


# Exit code and container; then the phase, and the condition Ready.
ENDS: dict[str, tuple[int, str, str, tuple[str, str]]] = {
    "what no attempt changes": (
        *(64, "dependencies", "Failed"),
        ("False", ConditionReason.DEPENDENCIES_FAILED),
    ),
    "a commit that is gone": (64, "checkout", "Failed", ("False", ConditionReason.CHECKOUT_FAILED)),
    "an index that is away": (69, "dependencies", "Starting", ("False", ConditionReason.RESTARTING)),
    "what another attempt may change": (
        *(1, "dependencies", "Starting"),
        ("False", ConditionReason.RESTARTING),
    ),
}


@pytest.mark.parametrize(("code", "container", "phase", "expected"), ENDS.values(), ids=ENDS)
def test_a_failure_names_the_pod_and_the_requirement(
    code: int, container: str, phase: str, expected: tuple[str, str]
) -> None:
    observation = observed(child(JOB, "Failed"), pods=[failed(code, container)])
    decision = conclude(job(running()), observation, settings=SETTINGS)
    ready = said(decision, ConditionType.READY)
    assert ready
    assert (decision.status.phase, ready[:2]) == (phase, expected)
    assert f"pod {POD} ended with exit code {code}: init container {container}: {WHY}" in ready[2]
    failure = decision.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (REASONS[container], code)


# Exit code, container, runPolicy; then the reason of Failed, or the attempt, the restarts and the seconds until it may start.
POLICIES: dict[str, tuple[int, str, Json, tuple[Any, ...]]] = {
    "an index that is away": (69, "dependencies", {}, (None, 2, 0, 10)),
    "a server of Git that refuses the login": (69, "checkout", {}, (None, 2, 0, 10)),
    "an index that is away, where no restarts are left": (
        *(69, "dependencies", {"maxRestarts": 0}),
        (None, 2, 0, 10),
    ),
    "69 is fatal for a command": (69, "checkout", {"fatalExitCodes": [69]}, (None, 2, 0, 10)),
    "what another attempt may change": (1, "dependencies", {}, (None, 2, 1, None)),
    "code that cannot be fetched": (1, "checkout", {}, (None, 2, 1, None)),
    "no restarts are left": (
        *(1, "dependencies", {"maxRestarts": 0}),
        (ConditionReason.MAX_RESTARTS_REACHED, 1, 0, None),
    ),
    "no restarts are left for code": (
        *(1, "checkout", {"maxRestarts": 0}),
        (ConditionReason.MAX_RESTARTS_REACHED, 1, 0, None),
    ),
    "another code is to be retried": (1, "checkout", {"retryableExitCodes": [137]}, (None, 2, 1, None)),
    "the code of a command is fatal": (1, "dependencies", {"fatalExitCodes": [1]}, (None, 2, 1, None)),
    "64 is not fatal for a command": (
        *(64, "checkout", {"fatalExitCodes": [42]}),
        (ConditionReason.CHECKOUT_FAILED, 1, 0, None),
    ),
    "64 is to be retried for a command": (
        *(64, "dependencies", {"fatalExitCodes": [], "retryableExitCodes": [64]}),
        (ConditionReason.DEPENDENCIES_FAILED, 1, 0, None),
    ),
}


@pytest.mark.parametrize(("code", "container", "policy", "expected"), POLICIES.values(), ids=POLICIES)
def test_codes_of_runpolicy_are_those_of_the_command(
    code: int, container: str, policy: Json, expected: tuple[Any, ...]
) -> None:
    observation = observed(child(JOB, "Failed", lived=400), pods=[failed(code, container)])
    decision = conclude(job(running(), **policy), observation, settings=SETTINGS)
    end, at = said(decision, ConditionType.FAILED), decision.status.restart_time
    waits = (at - NOW).total_seconds() if at else None
    assert (end[1] if end else None, decision.status.attempt, decision.status.restarts, waits) == expected


# A pod whose init container leaves no words of its own, then the reason and the message of status.lastFailure.
SILENT: dict[str, tuple[Json, tuple[str, str]]] = {
    "no memory": (
        failed(137, text="", reason="OOMKilled"),
        (
            "OOMKilled",
            "init container dependencies used more memory than its limit: it has the limit of the container trainer: raise that limit",
        ),
    ),
    "no memory for the code": (
        failed(137, "checkout", text="", reason="OOMKilled"),
        (
            "OOMKilled",
            "init container checkout used more memory than its limit: it has the limit of the container trainer: raise that limit",
        ),
    ),
    "a signal": (
        failed(139, text=""),
        (
            "DependenciesFailed",
            f"init container dependencies ended with exit code 139 and no message: see kubectl logs {POD} -c dependencies",
        ),
    ),
    "an image without the program": (
        failed(128, text="exec: python3: not found", reason="StartError"),
        ("StartError", "init container dependencies: exec: python3: not found"),
    ),
}


@pytest.mark.parametrize("policy", [{"retryableExitCodes": [1]}, {"fatalExitCodes": [64, 65, 128, 137, 139]}])
@pytest.mark.parametrize(("silent", "expected"), SILENT.values(), ids=SILENT)
def test_what_ends_without_a_reason_counts_whatever_the_codes_of_runpolicy_are(
    silent: Json, expected: tuple[str, str], policy: Json
) -> None:
    observation = observed(child(JOB, "Failed"), pods=[silent])
    after = conclude(job(running(), **policy), observation, settings=SETTINGS).status
    assert (after.phase, after.attempt, after.restarts) == ("Starting", 2, 1)
    assert after.last_failure
    assert (after.last_failure.reason, after.last_failure.message) == expected
    spent = conclude(job(running(), maxRestarts=0, **policy), observation, settings=SETTINGS)
    end = said(spent, ConditionType.FAILED)
    assert end
    assert end[1] == ConditionReason.MAX_RESTARTS_REACHED
    cause = f"; pod {POD} ended with exit code {after.last_failure.exit_code}: {expected[1]}"
    assert end[2].endswith(f"{cause}{NEXT_JOB}")


def test_a_node_that_evicts_a_pod_that_installs_is_no_failure_of_the_packages() -> None:
    evicted = failed(137, text="")
    evicted["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    after = conclude(job(running()), observed(child(JOB, "Failed"), pods=[evicted]), settings=SETTINGS).status
    assert (after.attempt, after.restarts) == (2, 0)
    assert after.last_failure
    assert after.last_failure.reason == "Evicted"


def test_a_command_and_containers_of_ones_own_cannot_say_that_their_failure_does_not_count() -> None:
    recorded_event = TerminationMessage(error=PodError(reason="DependenciesFailed", message="me too"))
    for failed_pod in (ended(JOB, 0, 69, recorded_event), failed(69, "mine")):
        decision = conclude(
            job(running()), observed(child(JOB, "Failed"), pods=[failed_pod]), settings=SETTINGS
        )
        assert (decision.status.attempt, decision.status.restarts) == (2, 1)


def test_a_container_of_ones_own_with_the_name_of_a_step_is_none() -> None:
    without = ftj(running(), trainer=trainer())
    observation = observed(child(JOB, "Failed"), pods=[failed(69, "dependencies")])
    decision = conclude(without, observation, settings=SETTINGS)
    assert (decision.status.attempt, decision.status.restarts) == (2, 1)


def test_who_waits_for_an_index_is_told_at_each_attempt_and_waits_longer() -> None:
    current, now, waits = running(), 0.0, []
    for number in range(1, 9):
        name = f"tune-train-{number}"
        observation = observed(child(name, "Failed", lived=now), pods=[failed(69, job=name)])
        now += 400
        after = conclude(job(current), observation, at=later(now), settings=SETTINGS).status
        assert after.restart_time
        waits.append((after.restart_time - later(now)).total_seconds())
        [change] = find_changes(current.conditions, after.conditions)
        sentence = (
            f"attempt {number} failed to start and does not count as a restart; pod {name}-0-abcde ended with exit code 69: init container "
            f"dependencies: the index has no trl>=99; at {after.restart_time:%H:%M:%S} UTC, attempt {number + 1} starts your "
            "command again"
        )
        recorded_event = build_event(EventTarget("FineTuneJob", "tune", "team", "u"), change, later(now))
        assert (recorded_event["type"], recorded_event["reason"], recorded_event["message"]) == (
            "Warning",
            "Restarting",
            sentence,
        )
        now = (after.restart_time - NOW).total_seconds()
        begun = conclude(job(after), observed(), at=after.restart_time)
        current = begun.status
        starting = said(begun, ConditionType.TRAINED)
        assert starting
        assert starting[1] == ConditionReason.STARTING
        assert starting[2].endswith("init container dependencies: the index has no trl>=99")
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    assert (current.restarts, current.attempt) == (0, 9)
