"""The preparation as a Job of one pod, the prep pod: Spark runs in it (mode Local), or it drives executors (mode Kubernetes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.children import is_suspended
from finetune_operator.finetunejob.draft import pending_run
from finetune_operator.finetunejob.draft.companions import restore_companions
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import (
    health,
    network_policy,
    pod_state,
    queueing,
    sidecars,
    step_state,
    template,
)
from finetune_operator.finetunejob.preparation import driver_pod, executors, preparation_lease, result
from finetune_operator.finetunejob.preparation.backend import Backend
from finetune_operator.policy.result import Continue, Outcome, Stop

_CONTAINER = names.PREP_CONTAINER
# The step in messages.
_WHAT = "the preparation"


class JobBackend(Backend):
    """Modes Local and Kubernetes."""

    modes = ("Local", "Kubernetes")

    def find_pod_mistakes(self, spec: FineTuneJobSpec) -> Iterator[str]:
        yield from driver_pod.find_mistakes(spec)
        yield from executors.find_oversized_template(spec)

    def build_dry_runs(self, draft: Draft) -> list[Json]:
        return driver_pod.build_access_reviews(draft)

    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        return names.prep_name(ftj.name) in jobs

    def clean_up(self, draft: Draft) -> None:
        sidecars.release(draft, names.PREP, names.prep_name(draft.ftj.name), _CONTAINER)

    def prepare(self, draft: Draft) -> Outcome:
        step = _build_step(draft)
        state = step_state.classify_step(draft, step)
        if isinstance(state, step_state.Absent):
            self._start(draft, state)
            return Stop
        draft.record_start()
        match state:
            case step_state.Succeeded():
                return _finish(draft, state)
            case step_state.ResultLost():
                # A second run finds the version that the first one wrote, and writes nothing.
                draft.remove(state.job)
                lost = "the prep pod's result was lost with its node: the preparation runs again and finds the version that it wrote"
                draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, lost)
            case step_state.Failed():
                _fail(draft, state, step)
            case step_state.NodeLost():
                draft.update(last_failure=state.failure)
                draft.remove(state.job)
                message = f"{state.failure.message}; the preparation starts again"
                draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
                draft.requeue_after(draft.settings.poll_seconds)
            case step_state.Queued():
                _restore_companions(draft)
                queueing.report_queue(draft, ConditionType.PREPARED, _WHAT, state.job)
                draft.poll()
            case step_state.Stopping():
                message = f"{_WHAT} {step_state.describe_stop(draft, state)}"
                draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
            case step_state.Starting() | step_state.Blocked() | step_state.Running():
                _restore_companions(draft)
                _follow(draft, state)
        return Stop

    def _start(self, draft: Draft, state: step_state.Absent) -> None:
        """Create the children of the preparation, unless something has to be waited for."""
        if pending_run.wait_for_run(draft):
            return
        if driver_pod.wait_for_correction(draft, self.find_pod_mistakes(draft.spec)):
            return
        # An earlier prep pod must end first: two preparations at once would write the same table.
        obstacle = step_state.clear_name(draft, state)
        if obstacle:
            draft.record_start()
            message = f"the preparation waits for {obstacle}"
            draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
            draft.requeue_after(draft.settings.poll_seconds)
            return
        if preparation_lease.wait_for_lease(draft):
            return
        draft.record_start()
        health.forget_refusal(draft)
        job = _build_job(draft)
        draft.apply += [*_build_companions(draft), job]
        if is_suspended(job):
            queueing.report_queue(draft, ConditionType.PREPARED, _WHAT, job)
            return
        draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, "the prep pod is starting")


def _build_job(draft: Draft) -> Json:
    ftj, spec = draft.ftj, draft.spec
    driver_env: list[Json] = []
    if executors.count_executors(spec):
        executor = driver_pod.build_executor(ftj, spec, draft.settings)
        driver_env = executors.build_driver_env(ftj, executor)
    metadata = template.metadata(ftj, names.prep_name(ftj.name), names.PREP)
    pod = driver_pod.build_driver(draft, driver_env)
    pod = queueing.add_default_requests(draft, pod, _CONTAINER)
    job = template.retried_job(metadata, pod, _CONTAINER)
    return queueing.enqueue(draft, job)


def _build_companions(draft: Draft) -> list[Json]:
    """The ConfigMap with the recipe and, with executors, the Service by whose name they find the driver, and the NetworkPolicy."""
    recipe = driver_pod.build_recipe(draft)
    if not executors.count_executors(draft.spec):
        return [recipe]
    return [executors.build_service(draft.ftj), recipe, *network_policy.build_companions(draft)]


def _restore_companions(draft: Draft) -> None:
    name = names.prep_name(draft.ftj.name)
    companions = [("ConfigMap", name)]
    if executors.count_executors(draft.spec):
        companions += [("Service", name), *network_policy.companions(draft)]
    restore_companions(draft, companions, lambda: _build_companions(draft))


def _build_step(draft: Draft) -> step_state.Step:
    return step_state.Step(
        names.PREP,
        names.prep_name(draft.ftj.name),
        _CONTAINER,
        executors=executors.count_executors(draft.spec),
        use_less="create a FineTuneJob with another name and a lower data.prepare.spark.driverMemory",
    )


def _follow(draft: Draft, state: step_state.AtWork) -> None:
    step_state.report_pods(draft, state)
    executors.report_crash_loop(draft)
    if isinstance(state, step_state.Running):
        progress = executors.describe_progress(draft)
    else:
        image_pull = health.describe_image_pull(draft, pod_state.alive(state.pods))
        progress = f"the prep pod is starting{image_pull}"
    message = f"{progress}; kubectl logs job/{state.job['metadata']['name']} shows its progress"
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
    draft.poll()


def _finish(draft: Draft, state: step_state.Succeeded) -> Outcome:
    # If the Job retried, several pods may have a result: use the newest.
    results = [ended.message.prep for ended in state.ends if ended.message and ended.message.prep]
    if results:
        result.record_result(draft, results[-1])
        return Continue
    message = f"pod {state.ends[-1].pod} succeeded and reported no result: the image of spec.pods.prepare must run finetune-prep"
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARATION_FAILED, message)
    draft.fail(ConditionReason.PREPARATION_FAILED, message)
    return Stop


def _fail(draft: Draft, state: step_state.Failed, step: step_state.Step) -> None:
    reason, why = step_state.explain_failure(state, step, ConditionReason.PREPARATION_FAILED)
    if state.failure:
        draft.update(last_failure=state.failure)
    message = f"preparation failed{why}"
    draft.set(ConditionType.PREPARED, False, reason, message)
    draft.fail(reason, message)
