"""Dry runs of the training and evaluation Jobs, and of a pod of each: whether the API server would create them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.finetunejob.model import BLOCKING_REASONS, DryRunAnswer, FineTuneJob
from finetune_operator.finetunejob.observe.negative_cache import NegativeCache
from finetune_operator.finetunejob.observe.queues import find_missing_queue
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# Texts of the API server if a dry run is not possible: the RBAC authorizer forbids it, or a webhook with side effects prevents it.
_UNCHECKED = re.compile(r'cannot create resource "(pods|localsubjectaccessreviews)"|does not support dry run')
# Texts of the API server about a ResourceQuota.
_QUOTA = re.compile(r"exceeded quota|status unknown for quota")
# A temporary refusal: kube-controller-manager creates the default service account of a namespace only after the namespace.
_NO_ACCOUNT = "error looking up service account"
# Reasons by the HTTP status of a refusal: a policy (403), or an invalid template (400 and 422).
_REASONS = {
    403: ConditionReason.POD_REJECTED,
    400: ConditionReason.POD_TEMPLATE_INVALID,
    422: ConditionReason.POD_TEMPLATE_INVALID,
}
_MAX_DELAY_SECONDS = 60.0
# If more jobs have been checked, all their answers are discarded.
_MAX_JOBS = 8192


class _Answer(NamedTuple):
    """An answer, and the generation of the job that it is about."""

    generation: int
    dry_run_answer: DryRunAnswer


@dataclass
class DryRunner:
    """Makes dry runs. An acceptance is stored until the spec changes, and a refusal until the spec changes or a delay is over.

    Any other answer, for example an exceeded quota, is not stored: the next pass asks again.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._refusals = NegativeCache[_Answer](self.clock, _MAX_DELAY_SECONDS)
        self._answers: dict[str, _Answer] = {}
        """By job: the answer to its last dry runs."""

    def has_checked(self, ftj: FineTuneJob) -> bool:
        """Whether this process has made the dry runs of a job. An earlier process may have had other defaults, and so other pods."""
        answer = self._answers.get(ftj.uid)
        return answer is not None and answer.generation == ftj.generation

    async def run(self, ftj: FineTuneJob, bodies: Sequence[Json]) -> DryRunAnswer:
        """The API server's answer for a job; after a refusal, the same answer until the delay is over.

        NB: the status of a job without a preparation does not record that its pods were accepted, so each pass calls this while the job
        waits.
        """
        last_answer = self._answers.get(ftj.uid)
        if last_answer and last_answer.generation == ftj.generation and last_answer.dry_run_answer.admitted:
            return last_answer.dry_run_answer
        last_refusal = self._refusals.last_answer(ftj.uid)
        remaining_seconds = self._refusals.seconds_left(ftj.uid)
        if last_refusal and last_refusal.generation == ftj.generation and remaining_seconds:
            return replace(last_refusal.dry_run_answer, retry_seconds=remaining_seconds)
        answer = await run_dry_runs(self.kube, bodies)
        is_refusal = answer.reason in BLOCKING_REASONS
        has_new_spec = last_refusal is not None and last_refusal.generation != ftj.generation
        if has_new_spec or not is_refusal:
            # The delays start again.
            self.forget(ftj)
        if len(self._answers) >= _MAX_JOBS:
            self._answers.clear()
        self._answers[ftj.uid] = _Answer(ftj.generation, answer)
        if not is_refusal:
            return answer
        retry_seconds = self._refusals.record(ftj.uid, _Answer(ftj.generation, answer))
        return replace(answer, retry_seconds=retry_seconds)

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: there is a newer answer, or the job was deleted."""
        self._refusals.forget(ftj.uid)
        self._answers.pop(ftj.uid, None)


async def run_dry_runs(kube: Kube, bodies: Sequence[Json]) -> DryRunAnswer:
    """Create objects as dry runs, and check that each Job's queue exists. Returns the first problem; without any, that all are accepted."""
    for body in bodies:
        queue_problem = await find_missing_queue(kube, body)
        if queue_problem:
            return DryRunAnswer(
                admitted=False, reason=ConditionReason.QUEUE_INADMISSIBLE, message=queue_problem
            )
        try:
            answer = await kube.create(body, dry_run=True)
        except KubeError as error:
            # 409 is not a refusal: the object exists, or a ResourceQuota changed meanwhile.
            if error.status != 409:
                return replace(_explain_refusal(body, error), component=_component(body))
        else:
            if body["kind"] == "LocalSubjectAccessReview" and answer["status"]["allowed"] is not True:
                return _explain_forbidden(body)
    return DryRunAnswer(
        admitted=True,
        reason=ConditionReason.PODS_ADMITTED,
        message="the API server would create the training pods",
    )


def _component(body: Json) -> str:
    component: str = (body["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT, names.TRAIN)
    return component


def _explain_forbidden(review: Json) -> DryRunAnswer:
    """Return the answer for a LocalSubjectAccessReview of a ServiceAccount that is not allowed to create pods."""
    # The user is system:serviceaccount:NAMESPACE:NAME.
    *_, namespace, account = review["spec"]["user"].split(":")
    message = (
        f"ServiceAccount {account} is not allowed to create pods in namespace {namespace}, which Spark's driver must do: add the namespace to "
        "spark.namespaces of the chart, bind a Role to the account, or set spec.pods.prepare.serviceAccountName to another account, and "
        "the job continues"
    )
    return DryRunAnswer(admitted=False, reason=ConditionReason.EXECUTORS_FORBIDDEN, message=message)


def _explain_refusal(body: Json, error: KubeError) -> DryRunAnswer:
    """Return the answer for an error: a dry run is not possible, or failed for now; or the quota or something else forbids the object."""
    what = " ".join([body["kind"], body["metadata"].get("name", "")]).strip()
    where = body["metadata"]["namespace"]
    if _UNCHECKED.search(str(error)):
        log.warning("%s/%s is not checked by a dry run: %s", where, what, error)
        message = f"the training pods are not checked before they are created: {error}"
        return DryRunAnswer(admitted=None, reason=ConditionReason.NOT_CHECKED, message=message)
    if error.status not in _REASONS or _NO_ACCOUNT in str(error):
        log.warning("%s/%s cannot be checked by a dry run: %s", where, what, error)
        message = f"a dry run cannot check {what}: {error}: retrying"
        return DryRunAnswer(admitted=None, reason=ConditionReason.CHECK_FAILED, message=message)
    if error.status == 403 and _QUOTA.search(str(error)):
        message = (
            f"the API server would reject {what} now: {error}; the preparation continues, and the pods are created "
            "after the preparation"
        )
        return DryRunAnswer(admitted=False, reason=ConditionReason.QUOTA_EXCEEDED, message=message)
    message = f"the API server would reject {what}: {error}"
    return DryRunAnswer(admitted=False, reason=_REASONS[error.status], message=message)
