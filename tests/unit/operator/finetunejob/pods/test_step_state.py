"""How a step fares: one state with its cause, for preparation, training and evaluation alike."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.contract import PodError, TerminationMessage
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import Observed, PodEvent
from finetune_operator.finetunejob.pods import step_state
from finetune_operator.finetunejob.pods.step_state import (
    Absent,
    Blocked,
    Failed,
    NodeLost,
    Queued,
    ResultLost,
    Running,
    Starting,
    Step,
    StepState,
    Stopping,
    Succeeded,
)
from fixtures.operator_in_memory.decisions import (
    LEFT,
    NOW,
    SETTINGS,
    child,
    deleted_at,
    ended,
    ftj,
    later,
    lost,
    observed,
    on_unready_node,
    pod,
    stamped,
)

Json = dict[str, Any]
PREP, TRAIN = "tune-prep", "tune-train-1"
RETRIED = Step(names.PREP, PREP, names.PREP_CONTAINER, use_less="lower it")
WITH_EXECUTORS = Step(names.PREP, PREP, names.PREP_CONTAINER, executors=2)
GANG = Step(names.TRAIN, TRAIN, names.TRAINER_CONTAINER, nodes=2, attempt=1)
BOOM = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
PEER_LOST = TerminationMessage(error=PodError(reason="PeerLost", message="rank 0 is gone"))
SAVED = TerminationMessage(error=PodError(reason="Preempted", message="SIGTERM"))
NO_IMAGE: Json = {"name": "main", "image": "a:1", "state": {"waiting": {"reason": "ErrImagePull"}}}
NO_NODE: Json = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
PULLS = "pod {} cannot pull a:1: ErrImagePull: ErrImagePull"


def prep_pod(index: int = 0, **more: Any) -> Json:
    return pod(PREP, index, component=names.PREP, **more)


def prep_end(index: int, code: int, message: Any = "", at: int = 0) -> Json:
    return ended(PREP, index, code, message, container="prep", component=names.PREP, at=at)


def suspended(job: Json) -> Json:
    return {**job, "spec": {**job["spec"], "suspend": True}}


def resumed(job: Json) -> Json:
    """The same Job, whose pods were started again 20 s after NOW."""
    return {**job, "status": {**job["status"], "startTime": stamped(20)}}


def outlived(body: Json) -> Json:
    """The same pod, in which another container still runs."""
    statuses = [*body["status"]["containerStatuses"], {"name": "mesh", "state": {"running": {}}}]
    return {**body, "status": {**body["status"], "phase": "Running", "containerStatuses": statuses}}


def _name_pods(state: Succeeded | Stopping) -> list[str]:
    if isinstance(state, Stopping):
        return [body["metadata"]["name"] for body in state.stopping_pods]
    return [item.pod for item in state.ends]


def cause(state: StepState) -> Any:
    """What a state says of its cause: of stale children, blockages, ends and failures."""
    match state:
        case Absent():
            return state.has_stale_children
        case Starting() | Blocked() | Running():
            blockage = state.blockage
            failure = state.failure.message if state.failure else None
            return state.ready, (blockage.reason, blockage.message) if blockage else None, failure
        case Succeeded() | Stopping():
            return _name_pods(state)
        case NodeLost():
            loss = state.failure
            return loss.pod, loss.node, loss.rank, loss.reason, loss.message
        case Failed():
            failed = state.failure
            return (failed.pod, failed.exit_code, failed.reason, failed.message) if failed else None
    return None


STATES: dict[str, tuple[Step, Observed, type, Any]] = {
    "no Job": (RETRIED, observed(), Absent, False),
    "a pod of an earlier Job": (
        RETRIED,
        observed(pods=[prep_pod(owner="earlier")]),
        Absent,
        True,
    ),
    "a Job that is being deleted": (RETRIED, observed(child(PREP, deletionTimestamp="t")), Absent, True),
    "a Job of another step": (RETRIED, observed(child(TRAIN)), Absent, False),
    "in a queue": (GANG, observed(suspended(child(TRAIN))), Queued, None),
    "in a queue, and pods still stop": (
        GANG,
        observed(suspended(child(TRAIN)), pods=[pod(TRAIN)]),
        Stopping,
        ["tune-train-1-0-abcde"],
    ),
    "resumed, and a pod of before still stops": (
        GANG,
        observed(resumed(child(TRAIN)), pods=[deleted_at(10, pod(TRAIN, 0)), pod(TRAIN, 1)]),
        Stopping,
        ["tune-train-1-0-abcde"],
    ),
    "resumed, and the pods of before have stopped": (
        GANG,
        observed(resumed(child(TRAIN)), pods=[deleted_at(10, ended(TRAIN, 0, 75)), pod(TRAIN, 1)]),
        Starting,
        (1, None, None),
    ),
    "a container that was stopped with its suspended Job, and another one that still runs": (
        GANG,
        observed(suspended(child(TRAIN)), pods=[deleted_at(10, outlived(ended(TRAIN, 0, 1)))]),
        Stopping,
        ["tune-train-1-0-abcde"],
    ),
    "a suspended preparation that still stops": (
        RETRIED,
        observed(suspended(child(PREP)), pods=[prep_pod()]),
        Stopping,
        ["tune-prep-0-abcde"],
    ),
    "no pod yet": (RETRIED, observed(child(PREP)), Starting, (0, None, None)),
    "one of two pods": (GANG, observed(child(TRAIN), pods=[pod(TRAIN, 0)]), Starting, (1, None, None)),
    "all pods": (
        GANG,
        observed(child(TRAIN), pods=[pod(TRAIN, 0), pod(TRAIN, 1)]),
        Running,
        (2, None, None),
    ),
    "a pod that was replaced": (
        RETRIED,
        observed(child(PREP), pods=[prep_end(0, 1, BOOM), prep_pod(1)]),
        Running,
        (1, None, "it blew up"),
    ),
    "a rank that failed in a gang that has not ended": (
        GANG,
        observed(child(TRAIN), pods=[ended(TRAIN, 0, 1, BOOM), pod(TRAIN, 1)]),
        Starting,
        (1, None, None),
    ),
    "no image": (
        RETRIED,
        observed(child(PREP), pods=[prep_pod(phase="Pending", containerStatuses=[NO_IMAGE])]),
        Blocked,
        (0, (ConditionReason.IMAGE_PULL_FAILED, PULLS.format("tune-prep-0-abcde")), None),
    ),
    "a node that is being added": (
        RETRIED,
        observed(
            child(PREP),
            pods=[prep_pod(phase="Pending", conditions=[NO_NODE])],
            pod_events={"tune-prep-0-abcde": (PodEvent("TriggeredScaleUp", "pool 1->2", NOW),)},
        ),
        Blocked,
        (
            0,
            (
                ConditionReason.SCALING_UP,
                "pod tune-prep-0-abcde waits for a node that is being added: pool 1->2",
            ),
            None,
        ),
    ),
    "a quota": (
        RETRIED,
        observed(child(PREP), rejections={PREP: "exceeded quota"}),
        Blocked,
        (0, (ConditionReason.POD_REJECTED, "exceeded quota"), None),
    ),
    "an executor that is blocked": (
        WITH_EXECUTORS,
        observed(
            child(PREP),
            pods=[prep_pod()],
            executors=(pod("exec", 7, "Pending", containerStatuses=[NO_IMAGE]),),
        ),
        Running,
        (1, (ConditionReason.IMAGE_PULL_FAILED, PULLS.format("exec-7-abcde")), None),
    ),
    "complete": (
        RETRIED,
        observed(child(PREP, "Complete"), pods=[prep_end(1, 1, BOOM), prep_end(0, 0, at=9)]),
        Succeeded,
        ["tune-prep-0-abcde"],
    ),
    "complete, and its pods are gone": (RETRIED, observed(child(PREP, "Complete")), ResultLost, None),
    "failed, and the last pod counts": (
        RETRIED,
        observed(
            child(PREP, "Failed", "backoff"),
            pods=[prep_end(1, 1, BOOM, at=1), prep_end(0, 65, PEER_LOST, at=2)],
        ),
        Failed,
        ("tune-prep-0-abcde", 65, "PeerLost", "rank 0 is gone"),
    ),
    "failed, and the rank counts that others lost": (
        GANG,
        observed(
            child(TRAIN, "Failed"), pods=[ended(TRAIN, 0, 1, BOOM, at=2), ended(TRAIN, 1, 1, PEER_LOST, at=1)]
        ),
        Failed,
        ("tune-train-1-0-abcde", 1, "Boom", "it blew up"),
    ),
    "a pod on a node that is not ready": (
        GANG,
        observed(child(TRAIN), pods=[pod(TRAIN, 0), on_unready_node(pod(TRAIN, 1, node="n"))]),
        Blocked,
        (
            1,
            (
                ConditionReason.NODE_NOT_READY,
                "the node of pod tune-train-1-1-abcde on node n is not ready: if it does not return within distributed.nodeLostSeconds, "
                "Kubernetes evicts the pod and the step starts again on another node",
            ),
            None,
        ),
    ),
    "a pod that is being deleted": (
        GANG,
        observed(child(TRAIN), pods=[pod(TRAIN, 0), deleted_at(0, pod(TRAIN, 1))]),
        Running,
        (2, None, None),
    ),
    "a pod that is lost with its node": (
        GANG,
        observed(child(TRAIN), pods=[pod(TRAIN, 0), lost(pod(TRAIN, 1, node="n"))]),
        NodeLost,
        ("tune-train-1-1-abcde", "n", 1, "NodeLost", f"pod tune-train-1-1-abcde {LEFT.format('n')}"),
    ),
    "a pod that its node does not stop": (
        RETRIED,
        observed(child(PREP), pods=[prep_end(1, 1, BOOM), deleted_at(-200, prep_pod(node="n"))]),
        NodeLost,
        (
            "tune-prep-0-abcde",
            "n",
            0,
            "NodeLost",
            f"pod tune-prep-0-abcde {LEFT.format('n')}".replace(
                "is not ready", "did not stop the pod within its grace period"
            ),
        ),
    ),
    "a lost pod whose peers noticed": (
        GANG,
        observed(
            child(TRAIN, "FailureTarget"), pods=[ended(TRAIN, 0, 1, PEER_LOST), lost(pod(TRAIN, 1, node="n"))]
        ),
        NodeLost,
        ("tune-train-1-1-abcde", "n", 1, "NodeLost", f"pod tune-train-1-1-abcde {LEFT.format('n')}"),
    ),
    "a lost pod whose peers saved a checkpoint": (
        GANG,
        observed(
            child(TRAIN, "FailureTarget"), pods=[ended(TRAIN, 0, 75, SAVED), lost(pod(TRAIN, 1, node="n"))]
        ),
        NodeLost,
        ("tune-train-1-1-abcde", "n", 1, "NodeLost", f"pod tune-train-1-1-abcde {LEFT.format('n')}"),
    ),
    "a lost pod of a gang that had crashed": (
        GANG,
        observed(child(TRAIN, "FailureTarget"), pods=[ended(TRAIN, 0, 1, BOOM), lost(pod(TRAIN, 1))]),
        Failed,
        ("tune-train-1-0-abcde", 1, "Boom", "it blew up"),
    ),
    "a lost pod whose peers ended without a message": (
        GANG,
        observed(child(TRAIN, "FailureTarget"), pods=[ended(TRAIN, 0, 1), lost(pod(TRAIN, 1, node="n"))]),
        NodeLost,
        ("tune-train-1-1-abcde", "n", 1, "NodeLost", f"pod tune-train-1-1-abcde {LEFT.format('n')}"),
    ),
    "a pod that outlives a crash on a node that is ready": (
        GANG,
        observed(
            child(TRAIN, "FailureTarget"),
            pods=[ended(TRAIN, 0, 3, "it blew up"), deleted_at(-200, pod(TRAIN, 1, node="n"))],
        ),
        Failed,
        ("tune-train-1-0-abcde", 3, "Error", "it blew up"),
    ),
    "a lost pod of a gang that ran out of memory": (
        GANG,
        observed(
            child(TRAIN, "FailureTarget"),
            pods=[ended(TRAIN, 0, 137, "killed", reason="OOMKilled"), lost(pod(TRAIN, 1, node="n"))],
        ),
        Failed,
        ("tune-train-1-0-abcde", 137, "OOMKilled", "killed"),
    ),
    "a lost pod of a gang that Kueue stopped": (
        GANG,
        observed(suspended(child(TRAIN)), pods=[lost(pod(TRAIN, 1, node="n"))]),
        NodeLost,
        ("tune-train-1-1-abcde", "n", 1, "NodeLost", f"pod tune-train-1-1-abcde {LEFT.format('n')}"),
    ),
    "a lost pod of a gang that Kueue stopped, and a pod that ended with a code of its own": (
        GANG,
        observed(
            suspended(child(TRAIN)),
            pods=[deleted_at(-200, ended(TRAIN, 0, 1)), deleted_at(-200, pod(TRAIN, 1, node="n"))],
        ),
        NodeLost,
        (
            "tune-train-1-1-abcde",
            "n",
            1,
            "NodeLost",
            f"pod tune-train-1-1-abcde {LEFT.format('n').replace('is not ready', 'did not stop the pod within its grace period')}",
        ),
    ),
    "an earlier Job with a lost pod alone": (
        RETRIED,
        observed(child(PREP, deletionTimestamp="t"), pods=[lost(prep_pod())]),
        Absent,
        False,
    ),
    "failed, and its pods are gone": (RETRIED, observed(child(PREP, "Failed", "backoff")), Failed, None),
}


@pytest.mark.parametrize(("step", "observation", "expected", "why"), STATES.values(), ids=STATES)
def test_states(step: Step, observation: Observed, expected: type, why: Any) -> None:
    state = step_state.classify_step(Draft(ftj(), observation, later(60), SETTINGS), step)
    assert (type(state), cause(state)) == (expected, why)


EXPLAINED: dict[str, tuple[list[Json], tuple[str, str]]] = {
    "wrong data": (
        [prep_end(0, 65, BOOM)],
        ("DataWrong", " in pod tune-prep-0-abcde: it blew up"),
    ),
    "a crash": ([prep_end(0, 1, BOOM)], ("PreparationFailed", " in pod tune-prep-0-abcde: it blew up")),
    "no pod is left": ([], ("PreparationFailed", ": backoff")),
}


@pytest.mark.parametrize(("pods", "expected"), EXPLAINED.values(), ids=EXPLAINED)
def test_why_a_step_has_failed(pods: list[Json], expected: tuple[str, str]) -> None:
    draft = Draft(ftj(), observed(child(PREP, "Failed", "backoff"), pods=pods), NOW, SETTINGS)
    state = step_state.classify_step(draft, RETRIED)
    assert isinstance(state, Failed)
    assert step_state.explain_failure(state, RETRIED, ConditionReason.PREPARATION_FAILED) == expected
