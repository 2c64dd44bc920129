"""What follows a failed attempt: a restart, or the end of the job."""

from __future__ import annotations

import re

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import RunPolicy
from finetune_crds.status import LastFailure
from finetune_operator.finetunejob.decide import checkpoint
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import backoff, gang, own_code, pod_state
from finetune_operator.text import short

# The message of kube-controller-manager names the rule of the podFailurePolicy (pkg/controller/job, 1.37).
_RULE = re.compile(r"rule at index (\d+)")
# Characters of what is said of the attempt before, while the next one starts.
_CAUSE = 200
_POD_DELETED = "PodDeleted"


def after_failure(draft: Draft, number: int, mine: list[Json], child: Json, failed: Json) -> None:
    """Record the failure, then restart the gang or fail the job.

    Args:
        mine: the pods of the attempt.
        child: the attempt's Job.
        failed: the Job's condition Failed; empty where the Job has not failed.
    """
    failure = _explain(draft, number, mine, failed)
    deleted = _deleted(failure, mine)
    step = own_code.failed(failure, mine, draft.spec.trainer)
    if deleted:
        failure = failure.model_copy(update={"reason": _POD_DELETED})
    elif step and failure.reason == pod_state.UNEXPLAINED:
        failure = failure.model_copy(update={"reason": step.value})
    before = draft.status.last_failure
    saved = draft.status.checkpoint.step if draft.status.checkpoint else None
    draft.update(last_failure=failure.model_copy(update={"checkpoint_step": saved}))
    if was_preempted(failure, mine, child, failed, draft.spec.run_policy.fatal_exit_codes):
        seconds = backoff.run_seconds(child, draft.now)
        backoff.delay(draft, backoff.Attempt(seconds, saved, before.checkpoint_step if before else None))
        restart(draft, number + 1, counted=False, why=_interruption(draft, number, failure, deleted))
        return
    sentence = _sentence(failure, deleted)
    if step and failure.exit_code == contract.EXIT_UNAVAILABLE:
        # NB: however long the pods waited for a server, nothing was trained.
        backoff.delay(draft, backoff.Attempt(seconds=0))
        restart(
            draft,
            number + 1,
            counted=False,
            why=f"attempt {number} could not begin and does not count; {sentence}",
        )
        return
    if step:
        # NB: the codes of runPolicy are those of the command, which has not begun.
        verdict = step if failure.exit_code == contract.EXIT_RECIPE else None
    else:
        verdict = fatal(failure, draft.spec.run_policy)
    restarts = draft.status.restarts or 0
    if verdict:
        draft.set(ConditionType.TRAINED, False, verdict, sentence)
        draft.fail(verdict, sentence)
    elif restarts >= draft.spec.run_policy.max_restarts:
        limit = draft.spec.run_policy.max_restarts
        message = f"attempt {number} failed and runPolicy.maxRestarts = {limit} is used up; {sentence}"
        draft.set(ConditionType.TRAINED, False, ConditionReason.MAX_RESTARTS_REACHED, message)
        draft.fail(ConditionReason.MAX_RESTARTS_REACHED, message)
    else:
        restart(draft, number + 1, counted=True, why=f"attempt {number} failed; {sentence}")


def _explain(draft: Draft, number: int, mine: list[Json], failed: Json) -> LastFailure:
    """The failure that ended an attempt, as its pods tell it."""
    own = bool(draft.spec.trainer.command)
    use_less = "have your command use less" if own else "lower training.perDeviceBatchSize"
    per_node = draft.spec.distributed.ranks_per_node
    failure = pod_state.first_failure(mine, gang.CONTAINER, number, per_node, use_less)
    return failure or LastFailure(
        reason=failed.get("reason"),
        message=f"no pod is left to explain it: {failed.get('message', '')}",
        attempt=number,
    )


def _deleted(failure: LastFailure, mine: list[Json]) -> pod_state.Exit | None:
    """The pod whose deletion by a person is the failure; None where it is another one."""
    deleted = pod_state.deleted_before_the_end(mine, gang.CONTAINER)
    # NB: the ranks of the other pods agree on the end, with the same exit code.
    is_cause = deleted is not None and (
        failure.pod == deleted.pod or failure.exit_code == contract.EXIT_PREEMPTED
    )
    return deleted if is_cause else None


def _interruption(draft: Draft, number: int, failure: LastFailure, deleted: pod_state.Exit | None) -> str:
    """Why an attempt ended that was preempted, or whose pod somebody deleted."""
    in_vain = _why_it_was_in_vain(draft) if draft.status.restart_time else ""
    if deleted:
        return (
            f"attempt {number} was stopped{in_vain}: {pod_state.place(deleted.pod, deleted.node)} was deleted"
        )
    on = f": {pod_state.place(failure.pod, failure.node)}" if failure.pod else ""
    return f"attempt {number} was preempted{in_vain}{on}"


def _why_it_was_in_vain(draft: Draft) -> str:
    """What an attempt without progress lacked, as a part of a sentence."""
    if draft.spec.checkpoint is None:
        return " soon after it started"
    return " before it had a newer checkpoint" if draft.status.checkpoint else " before it had a checkpoint"


def _sentence(failure: LastFailure, deleted: pod_state.Exit | None) -> str:
    """What a failure says, with the pod that it is of."""
    if not failure.pod:
        return failure.message or ""
    after = " after it was deleted" if deleted else ""
    where = pod_state.place(failure.pod, failure.node)
    return f"{where} ended with exit code {failure.exit_code}{after}: {failure.message or ''}"


def cause_of(draft: Draft, number: int) -> str:
    """Why an attempt failed, shortly and as the end of a sentence; empty where it is not the last that did."""
    failure = draft.status.last_failure
    if failure is None or failure.attempt != number or not number:
        return ""
    how = f"ended with exit code {failure.exit_code}" if failure.exit_code is not None else "failed"
    # The last line of a traceback names its error.
    why = (failure.message or failure.reason or "").strip().splitlines()
    return f"; attempt {number} {how}: {short(why[-1], _CAUSE)}" if why else f"; attempt {number} {how}"


def was_preempted(
    failure: LastFailure, mine: list[Json], child: Json, failed: Json, fatal_codes: list[int]
) -> bool:
    """Whether the gang was preempted: by a drained or lost node, or by SIGTERM after a checkpoint."""
    rule = _matched(child, failed)
    if "onPodConditions" in rule or any(ended.evicted for ended in pod_state.exits(mine, gang.CONTAINER)):
        return True
    by_rule = rule.get("onExitCodes", {}).get("values") == [contract.EXIT_PREEMPTED]
    return (
        by_rule or failure.exit_code == contract.EXIT_PREEMPTED
    ) and contract.EXIT_PREEMPTED not in fatal_codes


def _matched(child: Json, failed: Json) -> Json:
    """The rule that ended the attempt, from its Job, since runPolicy may have changed."""
    named = _RULE.search(failed.get("message", ""))
    rules = child.get("spec", {}).get("podFailurePolicy", {}).get("rules", [])
    index = int(named[1]) if named else len(rules)
    return dict(rules[index]) if index < len(rules) else {}


def fatal(failure: LastFailure, policy: RunPolicy) -> ConditionReason | None:
    """Why the exit code of a failure rules out a restart, or None."""
    code = failure.exit_code
    if code is None:
        return None
    if code in policy.fatal_exit_codes:
        return pod_state.REASON_OF_EXIT.get(code, ConditionReason.FATAL_EXIT_CODE)
    if policy.retryable_exit_codes and code not in policy.retryable_exit_codes:
        return ConditionReason.FATAL_EXIT_CODE
    return None


def restart(draft: Draft, number: int, *, counted: bool, why: str) -> None:
    """Have another attempt begin.

    Args:
        number: of that attempt.
        counted: whether it counts against runPolicy.maxRestarts.
    """
    at = draft.status.restart_time
    draft.update(attempt=number)
    if counted:
        draft.update(restarts=(draft.status.restarts or 0) + 1, idle_restarts=None)
    when = f"at {at:%H:%M:%S} UTC, " if at else ""
    draft.set(
        ConditionType.TRAINED,
        False,
        ConditionReason.RESTARTING,
        f"{why}; {when}attempt {number} {checkpoint.beginning(draft)}",
    )
    draft.requeue_after((at - draft.now).total_seconds() if at else 0.1)
