"""An attempt whose Job Kueue suspends and resumes: the same attempt goes on with other pods."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import EndedAttempt, FineTuneJobStatus
from finetune_operator.finetunejob.model import FineTuneJob, QueueState
from fixtures.operator_in_memory.decisions import (
    child,
    conclude,
    deleted_at,
    ended,
    ftj,
    later,
    lost,
    observed,
    pod,
    running,
    said,
    stamped,
)

Json = dict[str, Any]
JOB = "tune-train-1"
CHECKPOINT: Json = {"uri": "s3://runs/tune"}
EVICTED = QueueState(
    reason="Pending",
    message="no quota",
    position=1,
    eviction_reason="Preempted",
    eviction_message="Preempted to accommodate a workload",
)
SAVED = TerminationMessage(
    checkpoint_step=40, error=PodError(reason="Preempted", message="stopped by SIGTERM")
)


def queued(*, start: float | None = None, condition: str = "", name: str = JOB) -> Json:
    """A Job in a queue: suspended, or started so many seconds after NOW. `condition`: of its condition Suspended."""
    body = child(name, creationTimestamp=stamped(0))
    body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    body["spec"]["suspend"] = start is None and condition != "True"
    if start is not None:
        body["status"]["startTime"] = stamped(start)
    if condition:
        body["status"]["conditions"] = [{"type": "Suspended", "status": condition}]
    return body


def gang(*, name: str = "new") -> list[Json]:
    return [
        {**body, "metadata": body["metadata"] | {"name": f"{name}-{rank}"}}
        for rank, body in enumerate((pod(JOB, 0), pod(JOB, 1)))
    ]


def saved(at: float) -> list[Json]:
    """The pods that stopped because somebody requested their deletion so many seconds after NOW."""
    return [deleted_at(at, ended(JOB, rank, 75, SAVED, at=int(at) + 9, node=f"n{rank}")) for rank in (0, 1)]


def of(status: FineTuneJobStatus) -> FineTuneJob:
    return ftj(status, runPolicy={"queueName": "gpus"}, checkpoint=CHECKPOINT)


def ends(status: FineTuneJobStatus) -> list[tuple[int, str | None, str | None, int | None, int | None]]:
    return [
        (item.attempt, item.cause, item.reason, item.exit_code, item.checkpoint_step)
        for item in status.attempts or []
    ]


def started(at: float = 60) -> FineTuneJobStatus:
    """The status of an attempt whose pods run."""
    return conclude(of(running()), observed(queued(start=at), pods=gang(name="old")), at=later(at + 5)).status


def test_an_attempt_that_kueue_evicts_is_recorded_and_keeps_its_number() -> None:
    decision = conclude(
        of(started()), observed(queued(), pods=saved(100), queue_state=EVICTED), at=later(120)
    )
    status = decision.status
    assert status.attempts == [
        EndedAttempt(
            attempt=1,
            end_time=later(120),
            cause="Preempted",
            reason="Preempted",
            exit_code=75,
            pod="tune-train-1-0-abcde",
            node="n0",
            checkpoint_step=40,
            message="Kueue evicted Job tune-train-1: Preempted to accommodate a workload",
        )
    ]
    assert (status.phase, status.attempt, status.restarts, status.last_failure) == ("Queued", 1, 0, None)
    assert status.nodes is not None
    assert (status.nodes.summary, status.nodes.pods) == ("0/2", None)
    assert decision.delete == ()
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus at position 1: no quota; its pods were stopped, and it resumes from the newest checkpoint",
    )


def test_an_older_kubernetes_keeps_the_start_time_of_a_suspended_job() -> None:
    job = queued()
    job["status"]["startTime"] = stamped(60)
    status = conclude(of(started()), observed(job, pods=saved(100)), at=later(120)).status
    assert ends(status) == [(1, "Preempted", "JobSuspended", 75, 40)]


def test_pods_of_before_are_no_failure_until_the_job_controller_has_started_new_ones() -> None:
    job = queued(start=60, condition="True")
    decision = conclude(of(started()), observed(job, pods=saved(100)), at=later(120))
    reported = said(decision, ConditionType.TRAINED)
    assert reported == ("False", ConditionReason.STARTING, "attempt 1: 0 of 2 pods are ready")
    assert ends(decision.status) == [(1, "Preempted", "JobSuspended", 75, 40)]


def test_an_eviction_is_recorded_once() -> None:
    status = started()
    observation = observed(queued(), pods=saved(100), queue_state=EVICTED)
    first = conclude(of(status), observation, at=later(120)).status
    assert conclude(of(first), observation, at=later(130)).status == first


def test_why_kueue_evicted_an_attempt_may_be_known_later() -> None:
    unexplained = conclude(of(started()), observed(queued(), pods=saved(100)), at=later(120)).status
    assert ends(unexplained) == [(1, "Preempted", "JobSuspended", 75, 40)]
    explained = conclude(of(unexplained), observed(queued(), queue_state=EVICTED), at=later(125)).status
    assert ends(explained) == [(1, "Preempted", "Preempted", 75, 40)]
    assert [item.message for item in explained.attempts or []] == [
        "Kueue evicted Job tune-train-1: Preempted to accommodate a workload"
    ]


def test_a_control_plane_whose_clock_is_ahead_explains_its_eviction() -> None:
    job = queued(condition="True")
    job["spec"]["suspend"] = True
    job["status"]["conditions"][0]["lastTransitionTime"] = stamped(123)
    unexplained = conclude(of(started()), observed(job, pods=saved(100)), at=later(120)).status
    explained = conclude(of(unexplained), observed(job, queue_state=EVICTED), at=later(125)).status
    assert ends(explained) == [(1, "Preempted", "Preempted", 75, 40)]


def test_each_eviction_of_an_attempt_is_recorded() -> None:
    status = conclude(of(started()), observed(queued(), pods=saved(100)), at=later(120)).status
    again = observed(queued(start=200, condition="False"), pods=[*saved(100), *gang()])
    status = conclude(of(status), again, at=later(205)).status
    assert (status.phase, ends(status)) == ("Training", [(1, "Preempted", "JobSuspended", 75, 40)])
    status = conclude(of(status), observed(queued(), pods=saved(100)), at=later(300)).status
    assert ends(status) == [
        (1, "Preempted", "JobSuspended", 75, 40),
        (1, "Preempted", "JobSuspended", None, 40),
    ]


def test_pods_of_before_an_eviction_do_not_count_as_pods_of_the_attempt() -> None:
    decision = conclude(
        of(started()),
        observed(queued(start=200, condition="False"), pods=[*saved(100), *gang()]),
        at=later(205),
    )
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.TRAINING,
        "attempt 1 runs on 2 pods; kubectl logs job/tune-train-1 shows its progress",
    )
    # The operator was down while the Job was suspended.
    assert ends(decision.status) == [(1, "Preempted", "JobSuspended", 75, 40)]


def test_a_failure_after_an_eviction_is_that_of_the_new_pods() -> None:
    crash = ended(JOB, 0, 1, "Traceback\nValueError: it broke", at=230)
    failed = queued(start=200, condition="False")
    failed["status"]["conditions"].append(
        {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    )
    decision = conclude(of(started()), observed(failed, pods=[*saved(100), crash]), at=later(240))
    assert decision.status.last_failure is not None
    assert (decision.status.last_failure.exit_code, decision.status.restarts) == (1, 1)


STOPPING: dict[str, Json] = {
    "suspended": queued(condition=""),
    "resumed, and the Job controller has not seen it": queued(condition="True"),
    "resumed": queued(start=101, condition="False"),
}


@pytest.mark.parametrize("job", STOPPING.values(), ids=STOPPING)
def test_an_evicted_attempt_waits_for_its_pods_to_stop(job: Json) -> None:
    before = started()
    stopping = [deleted_at(100, body) for body in gang(name="old")]
    decision = conclude(of(before), observed(job, pods=stopping, queue_state=EVICTED), at=later(110))
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.TRAINING,
        "attempt 1 waits for pod old-0 and 1 more to stop: Kueue evicted Job tune-train-1: Preempted to accommodate a workload",
    )
    assert decision.status.phase == "Training"
    assert decision.status.attempts is None


def test_a_container_that_ends_while_the_job_is_suspended_is_no_failure() -> None:
    stopping = []
    for rank in (0, 1):
        body = deleted_at(100, ended(JOB, rank, 1, at=101))
        body["status"]["phase"] = "Running"
        body["status"]["containerStatuses"].append({"name": "mesh", "state": {"running": {}}})
        stopping.append(body)
    decision = conclude(of(started()), observed(queued(), pods=stopping), at=later(110))
    assert (decision.status.attempt, decision.status.attempts, decision.delete) == (1, None, ())


def test_the_start_of_an_earlier_attempt_is_forgotten() -> None:
    second = queued(name="tune-train-2")
    before = started().model_copy(update={"attempt": 2})
    status = conclude(of(before), observed(second), at=later(120)).status
    assert status.jobs is not None
    assert (status.jobs.train_start_time, status.attempts) == (None, None)


def test_without_a_queue_the_start_of_pods_is_not_recorded() -> None:
    job = child(JOB, creationTimestamp=stamped(0))
    job["status"]["startTime"] = stamped(1)
    status = conclude(ftj(running()), observed(job, pods=gang()), at=later(5)).status
    assert status.jobs is not None
    assert status.jobs.train_start_time is None


def test_a_suspension_does_not_match_a_rule_of_the_failure_policy() -> None:
    """Kubernetes fails a suspended Job if a stopped pod matches a rule, and the next Job would be the last in the queue."""
    (job,) = (body for body in conclude(of(running())).apply if body["kind"] == "Job")
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]


def test_a_gang_of_which_a_pod_had_completed_starts_anew_and_whole() -> None:
    """Kubernetes never runs a completed index again: the resumed Job would start the other pods alone."""
    job = queued()
    job["status"]["succeeded"] = 1
    pods = [deleted_at(100, ended(JOB, 0, 75, SAVED, at=110)), ended(JOB, 1, 0, at=90)]
    decision = conclude(of(started()), observed(job, pods=pods, queue_state=EVICTED), at=later(120))
    assert ends(decision.status) == [(1, "Preempted", "Preempted", 75, 40)]
    assert (decision.status.attempt, decision.status.restarts) == (2, 0)
    assert [item.name for item in decision.delete] == [JOB]


def test_a_run_that_completes_while_kueue_stops_it_is_complete() -> None:
    """The Job controller does not count pods that a suspension stopped: its Job would run all of it again."""
    pods = [deleted_at(100, ended(JOB, rank, 0, at=110)) for rank in (0, 1)]
    observation = observed(queued(), pods=pods, queue_state=EVICTED)
    decision = conclude(of(started()), observation, at=later(120))
    assert (decision.status.phase, decision.delete, decision.requeue_seconds) == ("Succeeded", (), 0)
    # The Job is deleted once the status says that the job succeeded.
    assert [item.name for item in conclude(of(decision.status), observation, at=later(121)).delete] == [JOB]


def test_ranks_that_completed_in_different_evictions_do_not_complete_the_run() -> None:
    """In each of two runs, one of the two ranks reached the end of the training: no run has completed."""
    first = [deleted_at(100, ended(JOB, 0, 0, at=109)), deleted_at(100, ended(JOB, 1, 75, SAVED, at=109))]
    observation = observed(queued(), pods=first, queue_state=EVICTED)
    status = conclude(of(started()), observation, at=later(120)).status
    resumed = observed(queued(start=200, condition="False"), pods=[*first, *gang()])
    status = conclude(of(status), resumed, at=later(205)).status
    second = [deleted_at(300, ended(JOB, 1, 0, at=309))]
    observation = observed(queued(), pods=[*first, *second], queue_state=EVICTED)
    status = conclude(of(status), observation, at=later(320)).status
    assert (status.phase, ends(status)) == (
        "Queued",
        [(1, "Preempted", "Preempted", 75, 40), (1, "Preempted", "Preempted", None, 40)],
    )
    # The pods of a recorded eviction count no more, even if they all completed.
    third = [deleted_at(310, ended(JOB, 0, 0, at=319))]
    observation = observed(queued(), pods=[*second, *third], queue_state=EVICTED)
    assert conclude(of(status), observation, at=later(321)).status.phase == "Queued"


def test_kueue_does_not_run_a_completed_training_again_while_its_version_is_awaited() -> None:
    pods = [deleted_at(100, ended(JOB, rank, 0, at=110)) for rank in (0, 1)]
    observation = observed(queued(), pods=pods, queue_state=EVICTED)

    def registered(status: FineTuneJobStatus) -> FineTuneJob:
        return ftj(status, runPolicy={"queueName": "gpus"}, register={"model": "tuned"})

    decision = conclude(registered(started()), observation, at=later(120))
    assert (decision.status.phase, decision.delete) == ("Registering", ())
    following = conclude(registered(decision.status), observation, at=later(121))
    assert (following.status.phase, [item.name for item in following.delete]) == ("Registering", [JOB])


def never_run() -> list[Json]:
    """The pods of a gang that was stopped while its images were pulled, as the kubelet leaves them."""
    return [
        deleted_at(100, ended(JOB, rank, 137, at=101, reason="ContainerStatusUnknown")) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    "pods", [[], never_run()], ids=["without pods", "with pods whose images were pulled"]
)
def test_an_eviction_before_any_pod_ran_is_not_recorded(pods: list[Json]) -> None:
    starting = [pod(JOB, rank, "Pending") for rank in (0, 1)]
    status = conclude(of(running()), observed(queued(start=60), pods=starting), at=later(65)).status
    decision = conclude(of(status), observed(queued(), pods=pods, queue_state=EVICTED), at=later(120))
    assert decision.status.attempts is None
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus at position 1: no quota",
    )


def test_an_eviction_without_an_entry_does_not_explain_the_entry_before() -> None:
    unexplained = conclude(of(started()), observed(queued(), pods=saved(100)), at=later(120)).status
    starting = [*saved(100), pod(JOB, 0, "Pending"), pod(JOB, 1, "Pending")]
    resumed = observed(queued(start=200, condition="False"), pods=starting)
    status = conclude(of(unexplained), resumed, at=later(205)).status
    again = queued()
    again["status"]["conditions"] = [
        {"type": "Suspended", "status": "True", "lastTransitionTime": stamped(300)}
    ]
    observation = observed(again, pods=saved(100), queue_state=EVICTED)
    for seconds in (310, 320):
        status = conclude(of(status), observation, at=later(seconds)).status
        assert ends(status) == [(1, "Preempted", "JobSuspended", 75, 40)]


def resumed_after_eviction(**condition: str) -> Json:
    """A Job that was suspended and resumed while the operator was down, with another condition."""
    job = queued(start=200, condition="False")
    if condition:
        job["status"]["conditions"].append({"status": "True", **condition})
    return job


CRASHED = ended(JOB, 0, 1, "Traceback\nValueError: it broke", at=230)
COMPLETED = [ended(JOB, rank, 0, at=230) for rank in (0, 1)]
EVICTION = (1, "Preempted", "JobSuspended", 75, 40)
# The Job, and its pods since it was resumed; then the entries.
MISSED: dict[str, tuple[Json, list[Json], list[Any]]] = {
    "a crash": (
        resumed_after_eviction(type="Failed", reason="BackoffLimitExceeded"),
        [CRASHED],
        [EVICTION, (1, "Failed", "Error", 1, 40)],
    ),
    "the loss of a node": (
        resumed_after_eviction(),
        [lost(pod(JOB, 0)), pod(JOB, 1)],
        [EVICTION, (1, "NodeLost", "NodeLost", None, 40)],
    ),
    "the end of the training": (resumed_after_eviction(type="Complete"), COMPLETED, [EVICTION]),
}


@pytest.mark.parametrize(("job", "pods", "expected"), MISSED.values(), ids=MISSED)
def test_an_eviction_that_no_pass_saw_is_recorded_before(
    job: Json, pods: list[Json], expected: list[Any]
) -> None:
    decision = conclude(of(started()), observed(job, pods=[*saved(100), *pods]), at=later(240))
    assert ends(decision.status) == expected
    assert next(item.end_time for item in decision.status.attempts or []) == later(200)


def test_a_checkpoint_of_before_an_eviction_does_not_replace_a_newer_one() -> None:
    newer = SAVED.model_copy(update={"checkpoint_step": 80})
    job = resumed_after_eviction(type="Failed", reason="BackoffLimitExceeded")
    pods = [*saved(100), ended(JOB, 0, 75, newer, at=230)]
    status = conclude(of(started()), observed(job, pods=pods), at=later(240)).status
    assert ends(status) == [EVICTION, (1, "Preempted", "Preempted", 75, 80)]
    assert status.checkpoint is not None
    assert status.checkpoint.step == 80


REACHED = "Job has reached the specified backoff limit"


def fail_without_pods(**policy: Any) -> Any:
    """The decision about an attempt in a queue that has failed, and whose pods no longer exist."""
    job = queued(start=60)
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": REACHED}
    job["status"]["conditions"] = [failed]
    before = ftj(started(), runPolicy={"queueName": "gpus", **policy}, checkpoint=CHECKPOINT)
    return conclude(before, observed(job), at=later(120))


def test_a_failure_in_a_queue_that_no_pod_explains_does_not_count() -> None:
    """The pods may have stopped with exit code 75, and their node may have been deleted, while the operator was down."""
    decision = fail_without_pods(maxRestarts=0)
    assert (decision.status.attempt, decision.status.restarts) == (2, 0)
    assert ends(decision.status) == [(1, "Preempted", "BackoffLimitExceeded", None, None)]
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        "attempt 1 may have been preempted and does not count as a restart; the pods that could explain the failure no longer exist: "
        f"{REACHED}; at 12:02:10 UTC, attempt 2 starts from the beginning: no checkpoint is recorded",
    )


def test_a_failure_in_a_queue_that_cannot_be_a_preemption_counts() -> None:
    decision = fail_without_pods(fatalExitCodes=[64, 75])
    assert (decision.status.attempt, decision.status.restarts) == (2, 1)


def test_an_eviction_does_not_explain_the_one_before() -> None:
    unexplained = conclude(of(started()), observed(queued(), pods=saved(100)), at=later(120)).status
    resumed = conclude(
        of(unexplained), observed(queued(start=200, condition="False"), pods=gang()), at=later(205)
    ).status
    status = conclude(
        of(resumed), observed(queued(), pods=saved(600), queue_state=EVICTED), at=later(620)
    ).status
    assert [reason for _, _, reason, _, _ in ends(status)] == ["JobSuspended", "Preempted"]


def test_a_job_that_is_created_in_a_queue_is_queued_at_once() -> None:
    decision = conclude(of(running()))
    assert decision.status.phase == "Queued"
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus: kubectl get workloads shows why",
    )


def test_the_wait_for_pods_to_stop_is_over_when_they_are_gone() -> None:
    waiting = conclude(of(running()), observed(queued()), at=later(1)).status
    stopping = [deleted_at(100, body) for body in gang()]
    stopped = conclude(of(waiting), observed(queued(), pods=stopping), at=later(105)).status
    reported = said(conclude(of(stopped), observed(queued()), at=later(130)), ConditionType.TRAINED)
    assert reported == (
        "False",
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus: kubectl get workloads shows why",
    )


def test_what_kueue_said_of_another_queue_is_not_kept() -> None:
    state = QueueState(reason="Inadmissible", message="LocalQueue gpus does not exist")
    status = conclude(of(running()), observed(queued(), queue_state=state), at=later(5)).status
    job = queued(name="tune-train-2")
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "research"
    second = status.model_copy(update={"attempt": 2})
    corrected = ftj(second, runPolicy={"queueName": "research"}, checkpoint=CHECKPOINT)
    reported = said(conclude(corrected, observed(job), at=later(30)), ConditionType.TRAINED)
    assert reported is not None
    assert reported[1:] == (
        ConditionReason.QUEUED,
        "attempt 2 waits in Kueue's queue research: kubectl get workloads shows why",
    )
