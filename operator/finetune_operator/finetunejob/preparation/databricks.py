"""The preparation as a Databricks run: one for each attempt, followed by polling, canceled on suspension and deletion.

The status records the attempt, and the job gets a finalizer, before the run is submitted. If a crash keeps the id of the run from
the status, the run is found by its name, and a repeated submission returns the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus, LastFailure
from finetune_crds.status_parts import DatabricksRunStatus, RunState
from finetune_operator import names
from finetune_operator.databricks import secret_scopes
from finetune_operator.databricks.access import find_named_login
from finetune_operator.databricks.model import ENDED, Run
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import CancelRun, Decision, SubmitRun
from finetune_operator.finetunejob.draft import mistakes, pending_run
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.finetunejob.pods import pod_state
from finetune_operator.finetunejob.preparation import databricks_submission as submissions
from finetune_operator.finetunejob.preparation import preparation_lease, result
from finetune_operator.finetunejob.preparation.backend import Backend
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.settings import Settings

NO_WHEEL = (
    "the operator image has no preparation wheel, which data.prepare.spark.mode Databricks requires: use a released image, or set "
    "FINETUNE_PREP_WHEELS to a folder with the output of trainer_image/wheel.py"
)
# The third failure that neither the recipe nor the data caused fails the job, as for a preparation in pods.
_MAX_FAILURES = 3
# Problems with the login. While one of them lasts, no run can be submitted.
_NO_LOGIN = (
    ConditionReason.CREDENTIALS_MISSING,
    ConditionReason.CREDENTIALS_UNREADABLE,
    ConditionReason.DATABRICKS_NOT_CONFIGURED,
    ConditionReason.DATABRICKS_FORBIDDEN,
)
_LOGIN = "spec.data.prepare.spark.databricks.secretRef"


class DatabricksBackend(Backend):
    """Mode Databricks."""

    modes = ("Databricks",)

    def find_mistakes(self, spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
        preparation = spec.prepare
        if preparation is None:
            return
        if preparation.spark.databricks is None:
            yield "spec.data.prepare.spark.databricks.volume is missing: set it to a folder of a Unity Catalog volume for the operator's wheel"
        if preparation.output.startswith("/"):
            yield (
                f"spec.data.prepare.output {preparation.output} is a folder of the pods, which a Databricks run cannot write: use "
                "s3://bucket/folder"
            )
        base = spec.model.base if spec.model else ""
        if base.startswith("models:/") and not settings.on_databricks(spec.tracking):
            yield (
                f"a Databricks run cannot read the tokenizer of {base} from this cluster's MLflow: set "
                "spec.tracking.uri to databricks, or use a model of the Hub"
            )
        yield from _find_unreadable_secrets(spec, settings)

    def find_pod_mistakes(self, spec: FineTuneJobSpec) -> Iterator[str]:
        return mistakes.of_preparation(spec)

    def find_obstacles(
        self, spec: FineTuneJobSpec, settings: Settings, namespace: str
    ) -> Iterator[tuple[ConditionReason, str]]:
        uses_login_of_chart = find_named_login(spec, settings) is None
        if uses_login_of_chart and namespace not in settings.databricks_namespaces:
            message = (
                f"jobs of namespace {namespace} are not allowed to run on Databricks as the service principal that the chart configures: "
                f"create a FineTuneJob with another name that sets {_LOGIN}, or add the namespace to databricks.namespaces of the chart"
            )
            yield ConditionReason.DATABRICKS_FORBIDDEN, message
        if not settings.prep_wheels:
            yield ConditionReason.DATABRICKS_NOT_CONFIGURED, NO_WHEEL

    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        # A preparation has begun if its run has not ended, and such a run needs the finalizer.
        return self.needs_finalizer(ftj.status)

    def prepare(self, draft: Draft) -> Outcome:
        run, preparation = draft.status.databricks_run, draft.observed.preparation
        if run is None or run.state in ("Canceled", "Failed"):
            # There is no run yet, or a suspension canceled it, or it ended by itself during a suspension.
            has_to_wait = pending_run.wait_for_run(draft) or preparation_lease.wait_for_lease(draft)
            if not has_to_wait:
                _begin(draft, run, failures=run.failures if run else 0)
            return Stop
        draft.record_start()
        draft.requeue_after(draft.settings.poll_seconds)
        if run.run_id is None:
            _submit(draft)
            return Stop
        if preparation is None:
            # The run was not read since the status was written: keep the message.
            return Stop
        if preparation.problem:
            message = f"Databricks run {run.run_id} continues, but the operator cannot read its state: {preparation.problem.message}"
            draft.set(ConditionType.PREPARED, False, preparation.problem.reason, message)
            return Stop
        reported_run = preparation.run
        if reported_run is None or not reported_run.has_ended:
            _follow(draft, run, reported_run)
            return Stop
        return _handle_end(draft, run, reported_run)

    def stop(self, draft: Draft) -> str | None:
        run, preparation = draft.status.databricks_run, draft.observed.preparation
        reported_run = preparation.run if preparation else None
        if run is None or run.state in ENDED:
            return None
        if run.run_id is None:
            if names.RUN_FINALIZER not in draft.ftj.finalizers:
                # No run is submitted without the finalizer, so there is none to cancel.
                draft.update(databricks_run=run.model_copy(update={"state": "Canceled"}))
                return None
            # A submitted run may exist whose id is not in the status.
            draft.actions.append(CancelRun(submissions.build_run_name(draft)))
            draft.requeue_after(0.0)
            return "waiting for Databricks, where a run of this job may exist"
        if reported_run and reported_run.has_ended:
            draft.update(databricks_run=run.model_copy(update={"state": reported_run.word}))
            return None
        draft.requeue_after(draft.settings.poll_seconds)
        draft.update(databricks_run=run.model_copy(update={"state": "Canceling"}))
        if preparation and preparation.problem:
            return f"waiting for Databricks, to cancel run {run.run_id}: {preparation.problem.message}"
        if reported_run and reported_run.word != "Canceling":
            draft.actions.append(CancelRun(submissions.build_run_name(draft), run.run_id))
        return f"waiting for {_describe_run(run)} to end after its cancellation"

    def needs_finalizer(self, status: FineTuneJobStatus) -> bool:
        run = status.databricks_run
        return run is not None and run.state not in ENDED

    def release(self, draft: Draft) -> None:
        problem = draft.observed.preparation.problem if draft.observed.preparation else None
        if problem and problem.reason == ConditionReason.CREDENTIALS_MISSING:
            # NB: the Secret cannot be created again in a namespace that is being deleted.
            draft.finalizer = False
            return
        waiting = self.stop(draft)
        if waiting is None:
            draft.finalizer = False
            return
        reason = problem.reason if problem else ConditionReason.PREPARING
        message = f"deletion is {waiting}; to delete the job and let the run continue, remove the finalizer {names.RUN_FINALIZER}"
        draft.set(ConditionType.PREPARED, False, reason, message)

    def may_release(self, ftj: FineTuneJob, problem: Problem) -> bool:
        # NB: most likely there is no run: the status has no id, and the login that would have submitted the run does not work.
        run = ftj.status.databricks_run
        return run is not None and run.run_id is None and problem.reason in _NO_LOGIN

    def record_run(self, decision: Decision, run_id: str | None) -> Decision:
        run = decision.status.databricks_run
        if run is None or run.run_id is not None:
            return decision
        # Without an id, the cancellation found no run.
        state: RunState = "Canceled"
        if run_id:
            was_submitted = any(isinstance(item, SubmitRun) for item in decision.actions)
            state = "Pending" if was_submitted else "Canceling"
        after = run.model_copy(update={"run_id": run_id, "state": state})
        return replace(decision, status=decision.status.model_copy(update={"databricks_run": after}))

    def record_refusal(self, status: FineTuneJobStatus) -> FineTuneJobStatus:
        run = status.databricks_run
        failed = run.model_copy(update={"state": "Failed"}) if run else None
        return status.model_copy(update={"databricks_run": failed})

    def find_page(self, status: FineTuneJobStatus) -> str | None:
        return status.databricks_run.url if status.databricks_run else None

    def find_progress(self, observed: Observed) -> str:
        run = observed.preparation.run if observed.preparation else None
        return run.progress if run else ""


def _find_unreadable_secrets(spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
    """Yield a mistake for each workspace secret that a run with the chart's login would read."""
    databricks, preparation = spec.databricks, spec.prepare
    if databricks is None or preparation is None or find_named_login(spec, settings):
        return
    cluster = databricks.compute.new_cluster
    if cluster:
        field = "spec.data.prepare.spark.databricks.compute.newCluster.env"
        yield from secret_scopes.find_unreadable(cluster.env, field, _LOGIN)
    yield from secret_scopes.find_unreadable(preparation.spark.conf, "spec.data.prepare.spark.conf", _LOGIN)


def find_run_to_follow(ftj: FineTuneJob) -> str | None:
    """The id of the run to read; None without a run, or if the run has ended and its result is recorded or not needed."""
    run = ftj.status.databricks_run
    if run is None or ftj.spec is None or not ftj.spec.databricks:
        return None
    has_ended = run.state in ENDED
    is_result_unread = (
        run.state == "Succeeded" and not ftj.holds(ConditionType.PREPARED) and not ftj.is_finished
    )
    return run.run_id if is_result_unread or not has_ended else None


def _begin(draft: Draft, before: DatabricksRunStatus | None, *, failures: int, why: str = "") -> None:
    """Record the next run in the status. A later pass submits it, once the status is written and the finalizer is set."""
    draft.record_start()
    attempt = before.attempt + 1 if before else 1
    draft.update(databricks_run=DatabricksRunStatus(attempt=attempt, failures=failures, state="Submitting"))
    draft.set(
        ConditionType.PREPARED,
        False,
        ConditionReason.PREPARING,
        f"{why}a Databricks run is about to be submitted",
    )
    draft.requeue_after(0.0)


def _submit(draft: Draft) -> None:
    if names.RUN_FINALIZER not in draft.ftj.finalizers:
        # `backends.set_finalizer` sets the finalizer, and the next pass submits.
        return
    if pending_run.wait_for_run(draft, needs_server=True):
        return
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, "a Databricks run is being submitted")
    draft.actions.append(SubmitRun(submissions.build_submission(draft)))


def _follow(draft: Draft, run: DatabricksRunStatus, reported_run: Run | None) -> None:
    """Report the state of a run that has not ended. `reported_run`: the run as last read; None if it is not known."""
    is_being_canceled = run.state == "Canceling"
    activity = "is being canceled" if is_being_canceled else "was submitted"
    if reported_run:
        # NB: every run ends through TERMINATING, which is reported as Canceling. In the status, Canceling means that the operator canceled
        # the run, so a reported Canceling is not copied.
        keeps_state = is_being_canceled or reported_run.word == "Canceling"
        state = run.state if keeps_state else reported_run.word
        draft.update(
            databricks_run=run.model_copy(update={"state": state, "url": reported_run.url or run.url})
        )
        if not is_being_canceled:
            activities = {
                "Pending": "waits for its compute",
                "Running": "is running",
                "Canceling": "is ending",
            }
            activity = activities.get(reported_run.word, activity)
    link = f"; see {reported_run.url}" if reported_run and reported_run.url else ""
    draft.set(
        ConditionType.PREPARED,
        False,
        ConditionReason.PREPARING,
        f"Databricks run {run.run_id} {activity}{link}",
    )


def _handle_end(draft: Draft, run: DatabricksRunStatus, reported_run: Run) -> Outcome:
    """Record the result of a run that has ended; without a result, begin another run or fail the job."""
    ended = run.model_copy(update={"state": reported_run.word, "url": reported_run.url or run.url})
    draft.update(databricks_run=ended)
    report = reported_run.report
    termination = report.message if report else None
    error = termination.error if termination else None
    if reported_run.word == "Succeeded" and termination and termination.prep:
        result.record_result(draft, termination.prep)
        return Continue
    if reported_run.word == "Canceled":
        _handle_canceled(draft, run, ended)
    elif report and error and report.exit_code in pod_state.REASON_OF_EXIT:
        _record_failure(draft, run, error.reason, error.message, code=report.exit_code)
        _fail(
            draft,
            pod_state.REASON_OF_EXIT[report.exit_code],
            f"preparation failed in {_describe_run(ended)}: {error.message}",
        )
    else:
        if error:
            message = error.message
        elif reported_run.word == "Succeeded":
            message = reported_run.message or f"it wrote no report to {submissions.find_folder(draft.ftj)}"
        else:
            message = reported_run.message or "it gave no reason"
        _record_failure(draft, run, error.reason if error else "RunFailed", message, code=None)
        _retry(draft, ended, message, is_final=reported_run.is_final)
    return Stop


def _handle_canceled(draft: Draft, before: DatabricksRunStatus, ended: DatabricksRunStatus) -> None:
    if before.state == "Canceling":
        # The operator canceled the run because of a suspension, which is over. The next pass begins another run, unless another job
        # prepares the same data.
        draft.requeue_after(0.0)
        return
    message = (
        f"{_describe_run(ended)} was canceled in the workspace: create a FineTuneJob with another name to prepare "
        "again; to pause a job, set spec.suspend"
    )
    _fail(draft, ConditionReason.RUN_CANCELED, message)


def _retry(draft: Draft, ended: DatabricksRunStatus, why: str, *, is_final: bool) -> None:
    """After a failure that neither the recipe nor the data caused, begin another run, up to a limit."""
    failures = ended.failures + 1
    if is_final:
        _fail(draft, ConditionReason.RUN_REFUSED, f"{_describe_run(ended)} failed permanently: {why}")
    elif failures >= _MAX_FAILURES:
        _fail(
            draft,
            ConditionReason.PREPARATION_FAILED,
            f"{_describe_run(ended)} failed, like the {failures - 1} runs before it: {why}",
        )
    else:
        _begin(draft, ended, failures=failures, why=f"{_describe_run(ended)} failed ({why}): ")


def _fail(draft: Draft, reason: ConditionReason, message: str) -> None:
    draft.set(ConditionType.PREPARED, False, reason, message)
    draft.fail(reason, message)


def _record_failure(
    draft: Draft, run: DatabricksRunStatus, reason: str, message: str, *, code: int | None
) -> None:
    failure = LastFailure(
        pod=f"databricks-run/{run.run_id}", exit_code=code, reason=reason, message=message, attempt=0
    )
    draft.update(last_failure=failure)


def _describe_run(run: DatabricksRunStatus) -> str:
    return f"Databricks run {run.run_id}" + (f" ({run.url})" if run.url else "")
