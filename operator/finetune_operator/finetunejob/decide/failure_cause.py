"""Why an attempt failed: the class of the failure decides what follows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.run_policy import RunPolicy
from finetune_crds.status import AttemptCause, LastFailure, ReducedMemory
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import memory_reduction, pod_state, queueing
from finetune_operator.finetunejob.pods.step_state import Failed

# The message of kube-controller-manager names the rule of the podFailurePolicy (pkg/controller/job, 1.37).
_RULE = re.compile(r"rule at index (\d+)")


@dataclass(frozen=True)
class Preempted:
    """The gang was preempted, or somebody deleted one of its pods."""


@dataclass(frozen=True)
class Unexplained:
    """The attempt was in a queue, and its pods no longer exist: they may have been preempted.

    NB: only in a queue. The Job of any other preempted attempt says so even without its pods: its message names the rule of the
    podFailurePolicy for EXIT_PREEMPTED, which a Job in a queue does not have.
    """


@dataclass(frozen=True)
class NotStarted:
    """The command did not start, since a server that its init containers need did not answer, or refused the login."""


@dataclass(frozen=True)
class Fatal:
    """No other attempt can succeed."""

    reason: ConditionReason


@dataclass(frozen=True)
class OutOfMemory:
    """The training ran out of memory. Another attempt can succeed only with settings that use less.

    Attributes:
        reduced_memory: the settings of that attempt; None if no setting is left that uses less.
    """

    reduced_memory: ReducedMemory | None


@dataclass(frozen=True)
class Retryable:
    """Another attempt may succeed."""


FailureCause = Preempted | Unexplained | NotStarted | Fatal | OutOfMemory | Retryable
CAUSES: dict[type[FailureCause], AttemptCause] = {
    Preempted: "Preempted",
    Unexplained: "Preempted",
    NotStarted: "NotStarted",
    Fatal: "Fatal",
    OutOfMemory: "OutOfMemory",
    Retryable: "Failed",
}
"""The word for each class in status.attempts."""


def classify_failure(
    draft: Draft, failure: LastFailure, init_reason: ConditionReason | None, state: Failed
) -> FailureCause:
    """Classify why an attempt failed. The class decides what happens next.

    Args:
        failure: the failure that ended the attempt.
        init_reason: the reason to report if one of the operator's init containers failed; None if none failed.
    """
    policy = draft.spec.run_policy
    if _was_preempted(failure, state, policy.fatal_exit_codes):
        return Preempted()
    if init_reason and failure.exit_code == contract.EXIT_UNAVAILABLE:
        return NotStarted()
    if init_reason:
        # NB: the exit codes in runPolicy are those of the command, which has not started.
        return Fatal(init_reason) if failure.exit_code == contract.EXIT_RECIPE else Retryable()
    # maxRestarts 0 also rules out an attempt with other settings.
    can_reduce = policy.max_restarts > 0
    was_reduction_refused = can_reduce and memory_reduction.was_reduction_refused(draft, failure)
    fatal_reason = _find_fatal_reason(failure, policy)
    # NB: the trainer refused settings that the operator chose to reduce memory, which does not mean that the spec is wrong.
    if fatal_reason and not was_reduction_refused:
        return Fatal(fatal_reason)
    if was_reduction_refused or (can_reduce and memory_reduction.is_out_of_memory(draft, failure)):
        reduced_memory = memory_reduction.find_reduction(draft, failure)
        # NB: the use of host memory varies, so the same settings may succeed next time; the use of GPU memory does not.
        if reduced_memory or failure.reason != memory_reduction.OUT_OF_HOST_MEMORY:
            return OutOfMemory(reduced_memory)
    may_be_preempted = contract.EXIT_PREEMPTED not in policy.fatal_exit_codes
    is_unexplained = state.failure is None and queueing.queue_of(state.job) is not None
    return Unexplained() if is_unexplained and may_be_preempted else Retryable()


def _was_preempted(failure: LastFailure, state: Failed, fatal_codes: list[int]) -> bool:
    """Whether the gang was preempted: a pod has the condition DisruptionTarget, or a rank stopped after SIGTERM, with EXIT_PREEMPTED.

    This exit code does not count as a preemption if runPolicy.fatalExitCodes contains it.
    """
    rule = _matched_rule(state.job, state.condition)
    if "onPodConditions" in rule or any(ended.evicted for ended in state.ends):
        return True
    ended_by_rule = rule.get("onExitCodes", {}).get("values") == [contract.EXIT_PREEMPTED]
    has_stopped = ended_by_rule or failure.exit_code == contract.EXIT_PREEMPTED
    return has_stopped and contract.EXIT_PREEMPTED not in fatal_codes


def _matched_rule(job: Json, condition: Json) -> Json:
    """The podFailurePolicy rule that ended the attempt; empty without one.

    The Job's condition Failed has the index of the rule. The rules are read from the Job, since runPolicy may have changed.
    """
    match = _RULE.search(condition.get("message", ""))
    if match is None:
        return {}
    rules = job.get("spec", {}).get("podFailurePolicy", {}).get("rules", [])
    index = int(match[1])
    return dict(rules[index]) if index < len(rules) else {}


def _find_fatal_reason(failure: LastFailure, policy: RunPolicy) -> ConditionReason | None:
    """Why the exit code of a failure rules out a restart; None if it does not."""
    code = failure.exit_code
    if code is None:
        return None
    if code in policy.fatal_exit_codes:
        return pod_state.REASON_OF_EXIT.get(code, ConditionReason.FATAL_EXIT_CODE)
    if policy.retryable_exit_codes and code not in policy.retryable_exit_codes:
        return ConditionReason.FATAL_EXIT_CODE
    return None
