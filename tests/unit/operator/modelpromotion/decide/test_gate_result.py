"""The result of a gate's Job that has ended, from the Job, its pods and its MLflow run."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from finetune_crds.gates import JobGate
from finetune_crds.promotion_status import MAX_GATE_NUMBERS
from finetune_operator.mlflow.model import Run
from finetune_operator.modelpromotion.decide.gate_result import build_result
from finetune_operator.modelpromotion.model import ObservedJob
from fixtures.operator_in_memory.decisions import later

Json = dict[str, Any]
LOG = "see kubectl logs -n team job/gate"
GATE = JobGate(image="tests:1", timeout_seconds=60)
START = {"startedAt": "2026-08-01T12:00:00Z"}


def job(condition: str = "Complete", **fields: str) -> Json:
    conditions = [{"type": condition, "status": "True", **fields}]
    return {
        "metadata": {"name": "gate", "namespace": "team", "uid": "j1"},
        "status": {"conditions": conditions},
    }


def pod(terminated: Json | None = None, *, at: int = 0, name: str = "gate-0", **status: Any) -> Json:
    states = [{"name": "main", "state": {"terminated": terminated}}] if terminated else []
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-08-01T12:00:{at:02d}Z"},
        "status": {"phase": "Failed", "containerStatuses": states, **status},
    }


class Case(NamedTuple):
    """A Job that has ended, and its result."""

    job: Json
    pods: tuple[Json, ...]
    outcome: str
    metrics: dict[str, str]
    message: str
    logged: dict[str, float] | None = None


NOT_NUMBERS = "its termination message is not a JSON object of numbers"
CASES = {
    "nothing is said": Case(job(), (pod({"exitCode": 0}),), "Succeeded", {}, ""),
    "numbers in the message": Case(
        job(), (pod({"message": '{"acc": 0.8, "n": 12}\n'}),), "Succeeded", {"acc": "0.8", "n": "12.0"}, ""
    ),
    "numbers in the run, of which the message overrides one": Case(
        job(),
        (pod({"message": '{"acc": 0.8}'}),),
        "Succeeded",
        {"acc": "0.8", "loss": "1.5"},
        "",
        {"acc": 0.1, "loss": 1.5},
    ),
    "not a number, infinite and too large": Case(
        job(),
        (pod({"message": '{"a": NaN, "b": -Infinity, "c": 1' + "0" * 400 + "}"}),),
        "Succeeded",
        {"a": "nan", "b": "-inf", "c": "inf"},
        "",
    ),
    "text instead of JSON": Case(
        job(), (pod({"message": "all good"}),), "Succeeded", {}, f"{NOT_NUMBERS}: 'all good'"
    ),
    "a list": Case(job(), (pod({"message": "[1]"}),), "Succeeded", {}, f"{NOT_NUMBERS}: '[1]'"),
    "a text among numbers": Case(
        job(),
        (pod({"message": '{"acc": 1, "model": "a"}'}),),
        "Succeeded",
        {},
        f"{NOT_NUMBERS}: 'model' is 'a'",
    ),
    "a truth among numbers": Case(
        job(), (pod({"message": '{"ok": true}'}),), "Succeeded", {}, f"{NOT_NUMBERS}: 'ok' is True"
    ),
    "its pods are gone": Case(job(), (), "Succeeded", {"acc": "0.5"}, "", {"acc": 0.5}),
    "failed, with the end of its log": Case(
        job("Failed", reason="BackoffLimitExceeded"),
        (pod({"exitCode": 1, "reason": "Error", "message": "\n".join(f"line {n}" for n in range(20))}),),
        "Failed",
        {},
        f"Job gate failed (exit code 1), {LOG}: " + "\n".join(f"line {n}" for n in range(12, 20)),
        {"acc": 0.5},
    ),
    "failed without a word": Case(
        job("Failed"),
        (pod({"exitCode": 137, "reason": "OOMKilled"}),),
        "Failed",
        {},
        f"Job gate failed (exit code 137, OOMKilled), {LOG}",
    ),
    "failed again": Case(
        job("Failed"),
        (
            pod({"exitCode": 2, "message": "last"}, at=9, name="gate-b"),
            pod({"exitCode": 1, "message": "first"}, at=3),
        ),
        "Failed",
        {},
        f"Job gate failed (exit code 2), {LOG}: last",
    ),
    "too late": Case(
        job("Failed"),
        (pod({"exitCode": 137, **START}, reason="DeadlineExceeded"),),
        "Failed",
        {},
        f"Job gate did not end within 60 s (timeoutSeconds): {LOG}",
    ),
    "never started": Case(
        job("Failed"),
        (
            pod(
                {"exitCode": 137, "reason": "ContainerStatusUnknown"},
                reason="DeadlineExceeded",
                message="too long",
            ),
        ),
        "NotStarted",
        {},
        "Job gate: the container of pod gate-0 did not start within 60 s (timeoutSeconds): correct the image or the template of the gate",
    ),
    "failed, and its pods are gone": Case(
        job("Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit"),
        (),
        "Failed",
        {},
        "Job gate failed: Job has reached the specified backoff limit",
    ),
    "rejected by its node": Case(
        job("Failed"),
        (pod(reason="OutOfcpu", message="Pod was rejected: not enough cpu"),),
        "Failed",
        {},
        "Job gate failed: Pod was rejected: not enough cpu",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_how_a_job_ended(case: Case) -> None:
    run = Run("r1", "e1", "FINISHED", metrics=case.logged) if case.logged is not None else None
    result = build_result(
        ObservedJob(case.job, case.pods, run),
        GATE,
        version="7",
        digest="d1",
        used_numbers=(),
        now=later(0),
    )
    assert (result.outcome, result.metrics, result.message) == (case.outcome, case.metrics, case.message)
    assert (result.version, result.digest, result.job) == ("7", "d1", "gate")
    assert result.run_id == ("r1" if run else None)


def test_numbers_that_gates_use_are_kept_before_others() -> None:
    logged = {f"system/{number:03d}": 1.0 for number in range(100)} | {"zeta": 2.0, "n" * 300: 3.0}
    result = build_result(
        ObservedJob(job(), (), Run("r1", "e1", "FINISHED", metrics=logged)),
        GATE,
        version="7",
        digest="d1",
        used_numbers={"zeta"},
        now=later(0),
    )
    assert len(result.metrics) == MAX_GATE_NUMBERS
    assert result.metrics["zeta"] == "2.0"
