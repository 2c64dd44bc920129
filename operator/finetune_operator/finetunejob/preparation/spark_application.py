"""The preparation as a SparkApplication: one for each attempt, with a name of its own. The operator polls its state.

The status records the SparkApplication in the pass that creates it. If the operator crashes before it writes the status, the next pass
finds the SparkApplication by its name, which follows from the attempt. Another SparkApplication is created after a deletion, or after a
failure that neither the recipe nor the data caused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.masking import mask_recognized
from finetune_crds.status import LastFailure
from finetune_crds.status_parts import SparkApplicationStatus
from finetune_operator import names
from finetune_operator.batch.state import describe_pod, describe_pods, is_being_deleted
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.children import is_lost
from finetune_operator.finetunejob.draft import pending_run
from finetune_operator.finetunejob.draft.companions import restore_companions
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob
from finetune_operator.finetunejob.pods import health, pod_state, queueing
from finetune_operator.finetunejob.preparation import (
    driver_pod,
    executors,
    preparation_lease,
    result,
    spark_manifest,
)
from finetune_operator.finetunejob.preparation.backend import Backend, CustomKind
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import keep_beginning, shorten

_CONTAINER = contract.APPLICATION_DRIVER_CONTAINER
# As often as a preparation in a prep pod: a first attempt, and two more after failures that neither the recipe nor the data
# caused.
_MAX_FAILURES = 3
_NEW, _COMPLETED, _FAILED, _DELETED = "New", "Completed", "Failed", "Deleted"
# States in which nothing of a SparkApplication runs.
_ENDED = (_COMPLETED, _FAILED, _DELETED)
# States in which the spark-operator would run a SparkApplication again, because somebody changed it.
_RERUN_STATES = ("PendingRerun", "Invalidating")
# How long the spark-operator may take to see a SparkApplication.
_OPERATOR_TIMEOUT = timedelta(seconds=60)
# The minimum time between the creation of a SparkApplication that fails and the creation of the next one. It doubles after each
# failure, as for the pods of a Job. A SparkApplication that fails after this time is replaced without a pause.
_RETRY_DELAY = timedelta(seconds=10)
_STATE_DESCRIPTIONS = {
    "Submitted": "was submitted, and its driver is starting",
    "SubmissionFailed": "could not be submitted",
    "Succeeding": "is ending",
    "Failing": "has failed and is ending",
    "Unknown": "has a state that the spark-operator does not recognize: check the node of its driver",
    "Suspending": "is being suspended by another client",
    "Suspended": "is suspended by another client",
    "Resuming": "is resuming",
}
_OUT_OF_MEMORY = (
    "the driver exceeded the memory limit of its pod, which is driverMemory plus 40%: create another FineTuneJob with more "
    "data.prepare.spark.driverMemory, or more spark.driver.memoryOverhead in data.prepare.spark.conf"
)
# The length of a state in the schema of the status.
_MAX_STATE_CHARS = 64
_MAX_ERROR_CHARS = 500


_KIND = CustomKind(
    name="SparkApplication",
    missing=Problem(
        ConditionReason.SPARK_OPERATOR_MISSING,
        "data.prepare.spark.mode SparkApplication requires Kubeflow's spark-operator, and this cluster has no SparkApplications "
        "(sparkoperator.k8s.io/v1beta2): install the spark-operator, and the job continues; or create a FineTuneJob with another name and "
        "spark.mode Kubernetes, which does not require the spark-operator",
    ),
    forbidden=Problem(
        ConditionReason.SPARK_OPERATOR_FORBIDDEN,
        "the operator is not allowed to read SparkApplications ({error}): install the chart with rbac.sparkApplications, and the job continues",
    ),
    remedy="install spark-operator 2.1 or later, or correct spec.pods.prepare, and the job continues",
)


class SparkApplicationBackend(Backend):
    """Mode SparkApplication."""

    modes = ("SparkApplication",)
    custom_kind = _KIND

    def find_pod_mistakes(self, spec: FineTuneJobSpec) -> Iterator[str]:
        return _find_pod_mistakes(spec)

    def build_dry_runs(self, draft: Draft) -> list[Json]:
        return driver_pod.build_access_reviews(draft)

    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        application = ftj.status.spark_application
        return application is not None and application.state not in _ENDED

    def reads_custom_kind(self, ftj: FineTuneJob) -> bool:
        # NB: the objects are read until the result is known; for a finished job, until nothing of it runs.
        return self.has_begun(ftj, {}) if ftj.is_finished else not ftj.holds(ConditionType.PREPARED)

    def prepare(self, draft: Draft) -> Outcome:
        draft.requeue_after(draft.settings.poll_seconds)
        children = draft.observed.custom_children or CustomChildren()
        status = draft.status.spark_application
        if children.problem:
            draft.set(ConditionType.PREPARED, False, children.problem.reason, children.problem.message)
            return Stop
        application = children.by_name.get(status.name) if status else None
        if status is None or application is None or _is_lost(application):
            _begin(draft, children, failures=status.failures if status else 0)
            return Stop
        draft.record_start()
        status = status.model_copy(update={"state": state_of(application)})
        draft.update(spark_application=status)
        if status.state == _COMPLETED:
            return _complete(draft, children, status, application)
        # NB: a failure of the preparation has attempt 0.
        loss = pod_state.find_loss(_find_driver(children, status), draft.now, attempt=0)
        if loss:
            draft.update(last_failure=loss)
            _begin(draft, children, failures=status.failures, why=f"{loss.message}; ")
        elif status.state == _FAILED:
            _fail(draft, children, status, application)
        elif status.state in _RERUN_STATES:
            draft.remove(application, _KIND.name)
            _report_progress(draft, f"SparkApplication {status.name} was changed and is being replaced")
        else:
            config_map = ("ConfigMap", names.prep_name(draft.ftj.name))
            restore_companions(draft, [config_map], lambda: [driver_pod.build_recipe(draft)])
            _follow(draft, children, status, application)
        return Stop

    def stop(self, draft: Draft) -> str | None:
        children, status = draft.observed.custom_children, draft.status.spark_application
        if children is None:
            return None
        if children.problem:
            # Without the kind, no SparkApplication exists.
            nothing_runs = status is None or children.problem.reason == ConditionReason.SPARK_OPERATOR_MISSING
            return None if nothing_runs else children.problem.message
        waits_for = _stop(draft, children)
        if waits_for:
            draft.requeue_after(draft.settings.poll_seconds)
            return f"waiting for {waits_for} to stop"
        if status and status.state not in _ENDED:
            if _may_come_late(draft):
                # The job need not wait, but a later pass deletes a driver that still appears.
                draft.requeue_after(draft.settings.poll_seconds)
                return None
            # A SparkApplication that remains has ended by itself. Its result is read when the job is resumed.
            application = children.by_name.get(status.name)
            after = state_of(application) if application else _DELETED
            draft.update(spark_application=status.model_copy(update={"state": after}))
        return None


def _find_pod_mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    yield from driver_pod.find_mistakes(spec)
    yield from spark_manifest.find_mistakes(spec)


def state_of(application: Json) -> str:
    """The state of a SparkApplication, such as Running for RUNNING; New before the spark-operator has seen it."""
    word = str(_application_state(application).get("state") or "")
    return "".join(part.capitalize() for part in word.split("_"))[:_MAX_STATE_CHARS] or _NEW


def _application_state(application: Json) -> Json:
    application_state: Json = (application.get("status") or {}).get("applicationState") or {}
    return application_state


def _is_lost(application: Json) -> bool:
    """Whether a SparkApplication is being deleted before it completed. A completed one still has its result."""
    return is_being_deleted(application) and state_of(application) != _COMPLETED


def _begin(draft: Draft, children: CustomChildren, *, failures: int, why: str = "") -> None:
    """Create the next SparkApplication, when nothing of an earlier one runs: two at once would write the same table."""
    status = draft.status.spark_application
    attempt = status.attempt + 1 if status else 1
    name = names.application_name(draft.ftj.name, attempt)
    # An interrupted pass may have created the SparkApplication: then the run and the pods need no check.
    exists = name in children.by_name
    if not exists and pending_run.wait_for_run(draft):
        return
    if not exists and driver_pod.wait_for_correction(draft, _find_pod_mistakes(draft.spec)):
        return
    if preparation_lease.wait_for_lease(draft):
        return
    draft.record_start()
    waits_for = _stop(draft, children, except_name=name)
    if waits_for:
        _report_progress(draft, f"{why}the preparation waits for {waits_for} to stop")
        return
    if not exists:
        health.forget_refusal(draft)
        draft.apply += [driver_pod.build_recipe(draft), _build_application(draft, name)]
    draft.update(
        spark_application=SparkApplicationStatus(attempt=attempt, failures=failures, name=name, state=_NEW)
    )
    _report_progress(draft, f"{why}SparkApplication {name} waits for the spark-operator")


def _build_application(draft: Draft, name: str) -> Json:
    ftj, spec = draft.ftj, draft.spec
    driver = driver_pod.build_driver(draft, executors.build_submitted_driver_env(ftj))
    executor = driver_pod.build_executor(ftj, spec, draft.settings)
    return spark_manifest.build_manifest(ftj, spec, name, driver=driver, executor=executor)


def _follow(
    draft: Draft, children: CustomChildren, status: SparkApplicationStatus, application: Json
) -> None:
    """Report how far a SparkApplication is that has not ended, and delete drivers of earlier attempts."""
    driver = _find_driver(children, status)
    for pod in pod_state.alive(children.pods):
        if pod not in driver:
            # NB: the spark-submit of an earlier attempt may create its driver late, and that driver would delete the current executors.
            draft.remove(pod, "Pod")
    alive = pod_state.alive(driver)
    executors.report_executors(draft, alive)
    queue = queueing.queue_of(application)
    if status.state == "Suspended" and queue:
        message = f"SparkApplication {status.name} waits in Kueue's queue {queue}"
        draft.set(ConditionType.PREPARED, False, ConditionReason.QUEUED, message)
    elif status.state == _NEW:
        _report_progress(draft, _describe_wait(draft, status.name, application))
    elif status.state == "Running":
        running = (
            executors.describe_progress(draft)
            if pod_state.count_ready(driver)
            else f"the driver of SparkApplication {status.name} is starting{health.describe_image_pull(draft, alive)}"
        )
        _report_progress(
            draft, f"{running}; kubectl logs {names.driver_name(status.name)} shows its progress"
        )
    else:
        activity = _STATE_DESCRIPTIONS.get(status.state, f"is {status.state}")
        error = _find_error(application)
        cause = f" ({error})" if error else ""
        pulling = health.describe_image_pull(draft, alive) if status.state == "Submitted" else ""
        _report_progress(draft, f"SparkApplication {status.name} {activity}{cause}{pulling}")


def _describe_wait(draft: Draft, name: str, application: Json) -> str:
    """Explain what a SparkApplication without a state waits for."""
    if draft.now - _parse_creation_time(application) < _OPERATOR_TIMEOUT:
        return f"SparkApplication {name} waits for the spark-operator"
    return (
        f"SparkApplication {name} waits for the spark-operator, which has not handled it for {int(_OPERATOR_TIMEOUT.total_seconds())} s: "
        f"check whether it runs, and whether it watches namespace {draft.ftj.namespace} (spark.jobNamespaces of its chart)"
    )


def _complete(
    draft: Draft,
    children: CustomChildren,
    status: SparkApplicationStatus,
    application: Json,
) -> Outcome:
    """Record the result of a completed SparkApplication. If the result is lost, begin another SparkApplication."""
    succeeded = [
        ended for ended in pod_state.exits(_find_driver(children, status), _CONTAINER) if ended.code == 0
    ]
    results = [ended.message.prep for ended in succeeded if ended.message and ended.message.prep]
    if results:
        result.record_result(draft, results[-1])
        return Continue
    if succeeded:
        message = f"pod {succeeded[-1].pod} succeeded and reported no result: the image of spec.pods.prepare must be built from finetune-prep"
        _give_up(draft, ConditionReason.PREPARATION_FAILED, message)
        return Stop
    # The pod and its result no longer exist. A second run finds the version that the first run wrote, and writes nothing.
    draft.remove(application, _KIND.name)
    why = "the driver's result was lost with its pod: the preparation runs again and finds the version that it wrote; "
    _begin(draft, children, failures=status.failures, why=why)
    return Stop


def _fail(
    draft: Draft,
    children: CustomChildren,
    status: SparkApplicationStatus,
    application: Json,
) -> None:
    """Fail the job if the recipe or the data are wrong; otherwise retry, up to a limit."""
    driver = _find_driver(children, status)
    failure = _find_failure(driver, status, application)
    draft.update(last_failure=failure)
    subject = f"SparkApplication {status.name}"
    if failure.exit_code in pod_state.REASON_OF_EXIT:
        place = describe_pod(failure.pod or "", failure.node)
        _give_up(
            draft,
            pod_state.REASON_OF_EXIT[failure.exit_code],
            f"preparation failed in {place} of {subject}: {failure.message}",
        )
        return
    # An eviction is not a failure.
    evicted = any(ended.evicted for ended in pod_state.exits(driver, _CONTAINER))
    failures = status.failures + (0 if evicted else 1)
    if failures >= _MAX_FAILURES:
        message = f"{subject} failed, like the {failures - 1} before it: {failure.message}"
        _give_up(draft, ConditionReason.PREPARATION_FAILED, message)
        return
    next_attempt_at = _parse_creation_time(application) + _RETRY_DELAY * 2**status.failures
    pause = next_attempt_at - draft.now
    if pause > timedelta(0):
        # The cause of a rejected submission, such as a full quota or an unavailable webhook, needs time to pass.
        _report_progress(
            draft,
            f"{subject} failed ({failure.message}): the next attempt starts in {math.ceil(pause.total_seconds())} s",
        )
        return
    _begin(draft, children, failures=failures, why=f"{subject} failed ({failure.message}): ")


def _find_failure(driver: list[Json], status: SparkApplicationStatus, application: Json) -> LastFailure:
    """Return the failure of the driver; without a pod, the failure of the SparkApplication."""
    failure = pod_state.last_failure(driver, _CONTAINER, 0)
    if failure is None:
        why = _find_error(application) or "it gave no reason"
        return LastFailure(pod=names.driver_name(status.name), reason="Failed", message=why, attempt=0)
    if failure.reason == "OOMKilled":
        return failure.model_copy(update={"message": _OUT_OF_MEMORY})
    return failure


def _parse_creation_time(application: Json) -> datetime:
    return datetime.fromisoformat(application["metadata"]["creationTimestamp"])


def _find_error(application: Json) -> str:
    """Return the error that the spark-operator reports; empty if there is none."""
    error = keep_beginning(str(_application_state(application).get("errorMessage") or ""))
    return shorten(mask_recognized(error), _MAX_ERROR_CHARS)


def _find_driver(children: CustomChildren, status: SparkApplicationStatus) -> list[Json]:
    """The pod of the driver, as a list; empty if it does not exist."""
    return [pod for pod in children.pods if pod["metadata"]["name"] == names.driver_name(status.name)]


def _report_progress(draft: Draft, message: str) -> None:
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)


def _give_up(draft: Draft, reason: ConditionReason, message: str) -> None:
    draft.set(ConditionType.PREPARED, False, reason, message)
    draft.fail(reason, message)


def _may_come_late(draft: Draft) -> bool:
    """Whether a spark-submit that was under way when the job ended may still create a driver."""
    ended = draft.status.completion_time
    return ended is not None and draft.now - ended < 2 * _OPERATOR_TIMEOUT


def _stop(draft: Draft, children: CustomChildren, *, except_name: str = "") -> str | None:
    """Delete what has not ended, except SparkApplication `except_name` and its driver; return what to wait for, or None.

    This applies to SparkApplications and to drivers, but not to a driver that is lost with its node.

    NB: the spark-operator deletes the driver of a SparkApplication only if it sees the deletion in time, so drivers are deleted here too.
    """
    running = {
        name: body
        for name, body in children.by_name.items()
        if name != except_name and (is_being_deleted(body) or state_of(body) not in (_COMPLETED, _FAILED))
    }
    kept_driver = names.driver_name(except_name)
    drivers = [
        pod
        for pod in pod_state.alive(children.pods)
        if pod["metadata"]["name"] != kept_driver and not is_lost(pod, draft.now)
    ]
    for body in running.values():
        draft.remove(body, _KIND.name)
    for pod in drivers:
        draft.remove(pod, "Pod")
    if drivers:
        return describe_pods(drivers)
    return f"SparkApplication {next(iter(running))}" if running else None
