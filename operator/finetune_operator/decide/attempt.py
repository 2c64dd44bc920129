"""What follows a failed attempt: another one, or the end of the job."""

from __future__ import annotations

import re

from finetune_crds import contract
from finetune_crds.conditions import Reason, Type
from finetune_crds.finetunejob import RunPolicy
from finetune_crds.status import LastFailure
from finetune_operator.decide import gang, pods
from finetune_operator.decide.draft import Draft
from finetune_operator.model import Json

# How kube-controller-manager words which rule of the podFailurePolicy matched (pkg/controller/job, 1.34).
_RULE = re.compile(r"rule at index (\d+)")


def after_failure(draft: Draft, number: int, mine: list[Json], failed: Json) -> None:
    """Write down the failure, then restart the gang or fail the job."""
    per_node = draft.spec.distributed.processes_per_node
    failure = pods.first_failure(mine, gang.CONTAINER, attempt=number, ranks_per_node=per_node)
    if failure is None:
        failure = LastFailure(
            reason=failed.get("reason"),
            message=f"no pod is left to tell why: {failed.get('message', '')}",
            attempt=number,
        )
    draft.update(last_failure=failure)
    if was_preempted(failure, mine, failed, draft.spec.run_policy.fatal_exit_codes):
        _restart(draft, number + 1, counted=False, why=f"attempt {number} was preempted")
        return
    verdict = fatal(failure, draft.spec.run_policy)
    restarts = draft.status.restarts or 0
    sentence = failure.message or ""
    if failure.pod:
        sentence = f"pod {failure.pod} ended with exit code {failure.exit_code}: {sentence}"
    if verdict:
        draft.set(Type.TRAINED, False, verdict, sentence)
        draft.fail(verdict, sentence)
    elif restarts >= draft.spec.run_policy.max_restarts:
        limit = draft.spec.run_policy.max_restarts
        message = f"attempt {number} failed and runPolicy.maxRestarts = {limit} is used up; {sentence}"
        draft.set(Type.TRAINED, False, Reason.MAX_RESTARTS_REACHED, message)
        draft.fail(Reason.MAX_RESTARTS_REACHED, message)
    else:
        _restart(draft, number + 1, counted=True, why=f"attempt {number} failed; {sentence}")


def was_preempted(failure: LastFailure, mine: list[Json], failed: Json, fatal_codes: list[int]) -> bool:
    """Whether the gang was stopped from outside: a drained or lost node, or SIGTERM after a checkpoint."""
    rule = _RULE.search(failed.get("message", ""))
    if rule and int(rule[1]) < gang.preemption_rules(fatal_codes):
        return True
    if any(ended.evicted for ended in pods.exits(mine, gang.CONTAINER)):
        return True
    return failure.exit_code == contract.EXIT_PREEMPTED and contract.EXIT_PREEMPTED not in fatal_codes


def fatal(failure: LastFailure, policy: RunPolicy) -> Reason | None:
    """Why the exit code of a failure rules out a restart, or None."""
    code = failure.exit_code
    if code is None:
        return None
    if code in policy.fatal_exit_codes:
        known = {contract.EXIT_RECIPE: Reason.RECIPE_WRONG, contract.EXIT_DATA: Reason.DATA_WRONG}
        return known.get(code, Reason.FATAL_EXIT_CODE)
    if policy.retryable_exit_codes and code not in policy.retryable_exit_codes:
        return Reason.FATAL_EXIT_CODE
    return None


def _restart(draft: Draft, number: int, *, counted: bool, why: str) -> None:
    draft.update(attempt=number, restarts=(draft.status.restarts or 0) + int(counted))
    draft.set(
        Type.TRAINED, False, Reason.RESTARTING, f"{why}; attempt {number} goes on from the newest checkpoint"
    )
    draft.look_again(0.1)
