"""The preparation as a Job of one pod, the prep pod: Spark runs in it (mode Local), or it drives executors (mode Kubernetes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.children import ComponentChildren, classify_children
from finetune_operator.finetunejob.draft import pending_run
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import health, pod_state, sidecars, template
from finetune_operator.finetunejob.preparation import driver_pod, executors, preparation_lease, result
from finetune_operator.finetunejob.preparation.backend import Backend
from finetune_operator.policy.result import Continue, Outcome, Stop

_CONTAINER = names.PREP_CONTAINER
_USE_LESS = "lower data.prepare.spark.driverMemory"


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
        name = names.prep_name(draft.ftj.name)
        prep_children = classify_children(draft.observed.jobs, draft.observed.pods, names.PREP, name)
        child, attempt_pods = prep_children.current_job, prep_children.pods
        if child is None:
            self._start(draft, prep_children)
            return Stop
        draft.record_start()
        if sidecars.has_completed(child, attempt_pods, _CONTAINER):
            return _finish(draft, child, attempt_pods)
        failed = sidecars.find_failure(child, attempt_pods, _CONTAINER, draft.now)
        if failed is not None:
            _fail(draft, attempt_pods, failed)
            return Stop
        _follow(draft, name, attempt_pods)
        return Stop

    def _start(self, draft: Draft, prep_children: ComponentChildren) -> None:
        if pending_run.is_run_pending(draft):
            draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, pending_run.RUN_PENDING)
            return
        if driver_pod.wait_for_correction(draft, self.find_pod_mistakes(draft.spec)):
            return
        if prep_children.stale_jobs or prep_children.stale_pods:
            draft.record_start()
            # Two preparations at once would write the same table.
            message = f"preparation starts when {pod_state.describe_stale(prep_children)} has stopped"
            draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
            draft.requeue_after(draft.settings.poll_seconds)
            return
        if preparation_lease.wait_for_lease(draft):
            return
        draft.record_start()
        health.forget_refusal(draft)
        draft.apply += _build_children(draft)
        draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, "the prep pod is starting")


def _build_children(draft: Draft) -> list[Json]:
    ftj, spec = draft.ftj, draft.spec
    service, driver_env = [], []
    if executors.count_executors(spec):
        executor = driver_pod.build_executor(ftj, spec, draft.settings)
        service, driver_env = [executors.build_service(ftj)], executors.build_driver_env(ftj, executor)
    metadata = template.metadata(ftj, names.prep_name(ftj.name), names.PREP)
    job = template.retried_job(metadata, driver_pod.build_driver(draft, driver_env), _CONTAINER)
    return [*service, driver_pod.build_recipe(draft), job]


def _follow(draft: Draft, name: str, attempt_pods: list[Json]) -> None:
    alive = pod_state.alive(attempt_pods)
    at_work = executors.report_executors(draft, alive)
    failure = pod_state.last_failure(attempt_pods, _CONTAINER, 0, _USE_LESS)
    if failure:
        draft.update(last_failure=failure)
    running = (
        executors.describe_progress(at_work, executors.count_executors(draft.spec))
        if pod_state.count_ready(attempt_pods)
        else f"the prep pod is starting{health.describe_image_pull(draft, alive)}"
    )
    draft.set(
        ConditionType.PREPARED,
        False,
        ConditionReason.PREPARING,
        f"{running}; kubectl logs job/{name} shows its progress",
    )
    draft.requeue_after(draft.settings.poll_seconds)


def _finish(draft: Draft, child: Json, attempt_pods: list[Json]) -> Outcome:
    succeeded = [ended for ended in pod_state.exits(attempt_pods, _CONTAINER) if ended.code == 0]
    results = [ended.message.prep for ended in succeeded if ended.message and ended.message.prep]
    if succeeded and not results:
        message = f"pod {succeeded[-1].pod} succeeded and reported no result: the image of spec.pods.prepare must run finetune-prep"
        draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARATION_FAILED, message)
        draft.fail(ConditionReason.PREPARATION_FAILED, message)
        return Stop
    if not results:
        # The pod no longer exists, nor does its result. A second run finds the version and writes nothing.
        draft.remove(child)
        draft.set(
            ConditionType.PREPARED,
            False,
            ConditionReason.PREPARING,
            "the prep pod's result was lost with its node: the preparation runs again and finds its version",
        )
        return Stop
    result.record_result(draft, results[-1])
    return Continue


def _fail(draft: Draft, attempt_pods: list[Json], failed: Json) -> None:
    failure = pod_state.last_failure(attempt_pods, _CONTAINER, 0, _USE_LESS)
    if failure is None:
        draft.fail(ConditionReason.PREPARATION_FAILED, f"preparation failed: {failed.get('message', '')}")
        return
    draft.update(last_failure=failure)
    reason = pod_state.REASON_OF_EXIT.get(failure.exit_code or 0, ConditionReason.PREPARATION_FAILED)
    where = pod_state.describe_pod(failure.pod or "", failure.node)
    message = f"preparation failed in {where}: {failure.message}{sidecars.explain_no_retry(attempt_pods, _CONTAINER)}"
    draft.set(ConditionType.PREPARED, False, reason, message)
    draft.fail(reason, message)
