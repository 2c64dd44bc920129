"""The evaluation: a Job of one pod evaluates the registered version, and its metrics become tags of the version.

The aliases move afterwards, so that clients that watch an alias find the metrics.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.evaluation import EvaluationStatus
from finetune_operator import names
from finetune_operator.finetunejob.children import is_suspended
from finetune_operator.finetunejob.decide import evaluation_result
from finetune_operator.finetunejob.decide.evaluation_result import InvalidMetricsError
from finetune_operator.finetunejob.decide.version import wait_for_lost_version
from finetune_operator.finetunejob.decision import LogMetrics, TagVersion
from finetune_operator.finetunejob.draft import mistakes
from finetune_operator.finetunejob.draft.companions import restore_companions
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.finetunejob.pods import (
    evaluation_pod,
    health,
    pod_state,
    queueing,
    sidecars,
    step_state,
)
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion

_CONTAINER = evaluation_pod.CONTAINER


def evaluate(draft: Draft) -> Outcome:
    """Evaluate the version and write its metrics to MLflow. Until they are written, each pass ends here."""
    name = names.evaluate_name(draft.ftj.name)
    # Not draft.status: `release` requires that an earlier pass wrote the result.
    if draft.ftj.status.evaluation:
        sidecars.release(draft, names.EVALUATE, name, _CONTAINER)
    if draft.spec.evaluation is None or draft.holds(ConditionType.EVALUATED):
        return Continue
    # The version exists, so the job no longer waits for it. `register` sets the condition again, with the aliases.
    draft.unset(ConditionType.REGISTERED)
    result = draft.status.evaluation or _run_in_pod(draft)
    return _write_metrics(draft, result) if result else Stop


def _run_in_pod(draft: Draft) -> EvaluationStatus | None:
    """Start or follow the evaluation pod, and return its result; None until there is one."""
    state = step_state.classify_step(draft, evaluation_pod.build_step(draft))
    if isinstance(state, step_state.Absent):
        _start(draft, state)
        return None
    if _evaluated_version(state.job) != _recorded_version(draft):
        draft.remove(state.job)
        _wait(
            draft,
            f"the evaluation of version {_evaluated_version(state.job)} is replaced by that of version {_recorded_version(draft)}, "
            "which the job has registered since",
        )
        return None
    match state:
        case step_state.Succeeded() | step_state.ResultLost():
            return _finish(draft, state)
        case step_state.Failed():
            _handle_failure(draft, state)
        case step_state.NodeLost():
            draft.update(last_failure=state.failure)
            draft.remove(state.job)
            _wait(draft, f"{state.failure.message}; the evaluation starts again")
        case step_state.Queued():
            _restore_companions(draft)
            _report_queue(draft, state.job)
        case step_state.Stopping():
            _wait(draft, f"the evaluation {step_state.describe_stop(draft, state)}")
        case step_state.Starting() | step_state.Blocked() | step_state.Running():
            _restore_companions(draft)
            _follow(draft, state)
    return None


def _evaluated_version(job: Json) -> str | None:
    return (job["metadata"].get("annotations") or {}).get(names.ANNOTATION_VERSION)


def _recorded_version(draft: Draft) -> str | None:
    return draft.status.model.version if draft.status.model else None


def _start(draft: Draft, state: step_state.Absent) -> None:
    """Create the evaluation's children, unless something has to be waited for."""
    pod_mistakes = "; ".join(mistakes.of_evaluation(draft.spec))
    if pod_mistakes:
        # NB: the template may have changed since the job was accepted.
        draft.set(ConditionType.PODS_HEALTHY, False, ConditionReason.POD_TEMPLATE_INVALID, pod_mistakes)
        _wait(draft, "the evaluation waits for a correction of spec.pods")
        return
    obstacle = step_state.clear_name(draft, state)
    if obstacle:
        # Two evaluations at once would write the same table of answers.
        _wait(draft, f"the evaluation waits for {obstacle}")
        return
    mlflow, version = draft.observed.mlflow, _observed_version(draft)
    if version is None:
        # The pod fetches the version from MLflow.
        _wait_for_version(draft, mlflow, "the evaluation starts when MLflow responds")
        return
    if draft.condition(ConditionType.EVALUATED) is None:
        # NB: a pass in which the API server rejects the Job writes only the rejection to the status. So an earlier pass writes this
        # condition, which says what the job waits for.
        _wait(draft, "the evaluation pod is starting")
        draft.requeue_after(0)
        return
    health.forget_refusal(draft)
    job = evaluation_pod.build_job(draft, version)
    draft.apply += [evaluation_pod.build_recipe(draft, version), job]
    if is_suspended(job):
        _report_queue(draft, job)
        return
    _wait(draft, "the evaluation pod is starting")


def _report_queue(draft: Draft, job: Json) -> None:
    queueing.report_queue(draft, ConditionType.EVALUATED, "the evaluation", job)
    draft.requeue_after(draft.settings.poll_seconds)


def _wait(draft: Draft, message: str) -> None:
    draft.set(ConditionType.EVALUATED, False, ConditionReason.EVALUATING, message)
    draft.requeue_after(draft.settings.poll_seconds)


def _observed_version(draft: Draft) -> RegisteredVersion | None:
    return draft.observed.mlflow.version if draft.observed.mlflow else None


def _wait_for_version(draft: Draft, mlflow: Mlflow | None, message: str) -> None:
    """Wait for MLflow to respond, or for a recorded version that MLflow does not find."""
    if mlflow and mlflow.problem is None:
        wait_for_lost_version(draft, ConditionType.EVALUATED, ConditionReason.EVALUATING)
        return
    if mlflow is None and draft.condition(ConditionType.EVALUATED) is not None:
        # MLflow was not read since the status was written: keep the message.
        draft.requeue_after(draft.settings.poll_seconds)
        return
    _wait(draft, f"{message}: {mlflow.problem.message}" if mlflow and mlflow.problem else message)


def _restore_companions(draft: Draft) -> None:
    """Create the recipe's ConfigMap again if somebody deleted it, once MLflow has responded: the recipe needs the version."""
    version = _observed_version(draft)
    if version:
        config_map = ("ConfigMap", names.evaluate_name(draft.ftj.name))
        restore_companions(draft, [config_map], lambda: [evaluation_pod.build_recipe(draft, version)])


def _follow(draft: Draft, state: step_state.AtWork) -> None:
    step_state.report_pods(draft, state)
    running = (
        f"version {_recorded_version(draft)} is being evaluated"
        if isinstance(state, step_state.Running)
        else f"the evaluation pod is starting{health.describe_image_pull(draft, state.alive)}"
    )
    _wait(draft, f"{running}; kubectl logs job/{state.job['metadata']['name']} shows its progress")


def _finish(draft: Draft, state: step_state.Succeeded | step_state.ResultLost) -> EvaluationStatus | None:
    """Record the result of a pod that ended, and return it; None if it is lost or invalid."""
    draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "every pod completed")
    if isinstance(state, step_state.ResultLost):
        draft.remove(state.job)
        _wait(draft, "the evaluation pod's result was lost with its node: the evaluation runs again")
        return None
    # If the Job retried, several pods may have succeeded: use the newest.
    last_exit = state.ends[-1]
    try:
        evaluation = _read_result(draft, state.job, last_exit)
    except InvalidMetricsError as error:
        _fail_job(draft, ConditionReason.EVALUATION_FAILED, f"evaluation failed: {error}")
        return None
    draft.update(evaluation=evaluation)
    return evaluation


def _read_result(draft: Draft, job: Json, pod_exit: pod_state.Exit) -> EvaluationStatus:
    """The result of a pod that succeeded.

    Raises:
        InvalidMetricsError: the pod reported no metrics, or invalid ones.
    """
    if evaluation_pod.evaluation_of(draft).command:
        digest = job["metadata"]["annotations"][names.ANNOTATION_DIGEST]
        try:
            return evaluation_result.from_command(pod_exit.text, digest)
        except InvalidMetricsError as error:
            raise InvalidMetricsError(f"pod {pod_exit.pod} wrote invalid metrics: {error}") from error
    result = pod_exit.message.evaluation if pod_exit.message else None
    if result is None:
        raise InvalidMetricsError(
            f"pod {pod_exit.pod} succeeded and reported no result: create a FineTuneJob with another name and an image that runs "
            "finetune-evaluate, or with evaluation.command"
        )
    return evaluation_result.from_built_in(result)


def _handle_failure(draft: Draft, state: step_state.Failed) -> None:
    step = evaluation_pod.build_step(draft)
    reason, why = step_state.explain_failure(state, step, ConditionReason.EVALUATION_FAILED)
    if state.failure:
        draft.update(last_failure=state.failure)
    _fail_job(draft, reason, f"evaluation failed{why}")


def _fail_job(draft: Draft, reason: ConditionReason, what: str) -> None:
    """Fail the job; its version remains."""
    name = draft.status.model.name if draft.status.model else None
    message = f"{what}; version {_recorded_version(draft)} of {name} remains, without aliases"
    draft.set(ConditionType.EVALUATED, False, reason, message)
    draft.fail(reason, message)


def _write_metrics(draft: Draft, evaluation: EvaluationStatus) -> Outcome:
    """Log the metrics to the run, then write them to the tags of the version.

    NB: the tags come last, so they show that both are done. Metrics that the run already has are not logged again.
    """
    mlflow, version = draft.observed.mlflow, _observed_version(draft)
    if mlflow is None or version is None:
        _wait_for_version(draft, mlflow, "the metrics are written when MLflow responds")
        return Stop
    what = f"{version.name} version {version.version}"
    tags = evaluation_result.version_tags(evaluation)
    missing_tags = {key: value for key, value in tags.items() if version.tags.get(key) != value}
    if missing_tags:
        metrics = evaluation_result.mlflow_metrics(evaluation)
        run = mlflow.writable_run
        # Without a run that can be written to, only the tags are written.
        unlogged = {name: value for name, value in metrics.items() if run and run.metrics.get(name) != value}
        if run and unlogged:
            draft.actions.append(LogMetrics(run.run_id, unlogged, evaluation_pod.step_after_training(draft)))
        draft.actions.append(TagVersion(version.name, version.version, missing_tags))
        _wait(draft, f"writing the metrics of {what} to its tags and its run")
        return Stop
    rows = f" on {evaluation.rows} rows" if evaluation.rows is not None else ""
    message = f"{what}{rows}: {evaluation_result.summarize(evaluation)}"
    draft.set(ConditionType.EVALUATED, True, ConditionReason.EVALUATED, message)
    return Continue
