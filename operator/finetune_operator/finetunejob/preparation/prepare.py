"""The preparation: a Job, a SparkApplication or a Databricks run that turns the source into splits of a known version."""

from __future__ import annotations

from finetune_crds import JobRecipe, contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import LocalReference
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.children import ComponentChildren, classify_children
from finetune_operator.finetunejob.draft import pending_run
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import health, pod_state, rendezvous, sidecars, template, workspace
from finetune_operator.finetunejob.preparation import (
    catalog,
    databricks,
    driver_pod,
    executors,
    preparation_lease,
    result,
    spark_application,
    spark_manifest,
)
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.settings import Settings
from finetune_operator.template_merge import merge

_CONTAINER = names.PREP_CONTAINER
_USE_LESS = "lower data.prepare.spark.driverMemory"


def prepare(draft: Draft) -> Outcome:
    """Create the splits; the pass ends until they exist."""
    if draft.holds(ConditionType.PREPARED):
        sidecars.release(draft, names.PREP, names.prep_name(draft.ftj.name), _CONTAINER)
        return Continue
    if draft.spec.data is None:
        message = "spec.data is not set: your command reads its own data"
        draft.set(ConditionType.PREPARED, True, ConditionReason.NO_DATA, message)
        return Continue
    if draft.spec.data.splits:
        draft.set(
            ConditionType.PREPARED,
            True,
            ConditionReason.SPLITS_GIVEN,
            "spec.data.splits names existing splits",
        )
        return Continue
    if databricks.is_databricks(draft.spec):
        return databricks.prepare(draft)
    if spark_application.is_spark_application(draft.spec):
        return spark_application.prepare(draft, lambda name: [_recipe(draft), _application(draft, name)])
    return _in_a_pod(draft)


def _in_a_pod(draft: Draft) -> Outcome:
    name = names.prep_name(draft.ftj.name)
    prep_children = classify_children(draft.observed.jobs, draft.observed.pods, names.PREP, name)
    child, attempt_pods = prep_children.current_job, prep_children.pods
    if child is None:
        if pending_run.is_run_pending(draft):
            draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, pending_run.RUN_PENDING)
        else:
            _start(draft, prep_children)
        return Stop
    draft.record_start()
    if sidecars.has_completed(child, attempt_pods, _CONTAINER):
        return _finish(draft, child, attempt_pods)
    failed = sidecars.find_failure(child, attempt_pods, _CONTAINER, draft.now)
    if failed is not None:
        _fail(draft, attempt_pods, failed)
        return Stop
    alive = pod_state.alive(attempt_pods)
    at_work = executors.report_executors(draft, alive)
    _note_retry(draft, attempt_pods)
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
    return Stop


def _start(draft: Draft, prep_children: ComponentChildren) -> None:
    if driver_pod.wait_for_a_correction(draft):
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
    driver = [executors.build_service(draft.ftj)] if executors.count_executors(draft.spec) else []
    draft.apply += [*driver, _recipe(draft), _job(draft)]
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, "the prep pod is starting")


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


def _note_retry(draft: Draft, attempt_pods: list[Json]) -> None:
    failure = pod_state.last_failure(attempt_pods, _CONTAINER, 0, _USE_LESS)
    if failure:
        draft.update(last_failure=failure)


def _recipe(draft: Draft) -> Json:
    ftj = draft.ftj
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": template.metadata(ftj, names.prep_name(ftj.name), names.PREP),
        "data": {contract.RECIPE_FILE: JobRecipe.of(ftj.reference, draft.spec).to_yaml()},
    }


def _executor(ftj: FineTuneJob, spec: FineTuneJobSpec, settings: Settings) -> Json:
    # NB: executors talk to no MLflow server, so they get none of its credentials.
    return executors.as_executor(ftj, _pod(ftj, spec, settings, secret=None, contract_env=[]), spec)


def executor_trial(ftj: FineTuneJob, settings: Settings) -> Json:
    """An executor's pod, to be created as a dry run.

    Raises:
        ValueError: the job has no spec, or nothing to prepare.
    """
    if ftj.spec is None:
        raise ValueError(f"{ftj.key} has no spec that can be read")
    return executors.build_trial_pod(_executor(ftj, ftj.spec, settings), ftj)


def _driver(ftj: FineTuneJob, spec: FineTuneJobSpec, settings: Settings, run_id: str | None) -> Json:
    """The prep pod."""
    number = executors.count_executors(spec)
    contract_env = [
        *rendezvous.run_env(servers=settings.servers(spec.tracking), run_id=run_id),
        *(_driver_env(ftj, spec, settings) if number else ()),
    ]
    login = workspace.pod_login(spec, settings, _CONTAINER)
    secret = None if login else spec.tracking.secret_of_pods
    pod = merge(_pod(ftj, spec, settings, secret=secret, contract_env=contract_env), login)
    pod = dict(merge(pod, catalog.login(spec, settings, _CONTAINER)))
    return executors.as_driver(pod, spec) if number else pod


def _driver_env(ftj: FineTuneJob, spec: FineTuneJobSpec, settings: Settings) -> list[Json]:
    if spark_application.is_spark_application(spec):
        return executors.build_submitted_driver_env(ftj)
    return executors.build_driver_env(ftj, _executor(ftj, spec, settings))


def _pod(
    ftj: FineTuneJob,
    spec: FineTuneJobSpec,
    settings: Settings,
    *,
    secret: LocalReference | None,
    contract_env: list[Json],
) -> Json:
    if spec.prepare is None:
        raise ValueError(f"{ftj.key} has nothing to prepare")
    pods = spec.pods.prepare
    return template.pod_template(
        container=_CONTAINER,
        image=pods.image or settings.prep_image,
        own_image=pods.image is None,
        pull_policy=settings.prep_pull_policy,
        user=settings.pod_user,
        command=["finetune-prep"],
        args=[],
        secret=secret,
        contract_env=contract_env,
        config_map=names.prep_name(ftj.name),
        model_cache=spec.model_cache,
        pod_labels=template.labels(ftj, names.PREP),
        subdomain=None,
        user_template=pods.template,
    )


def _application(draft: Draft, name: str) -> Json:
    ftj, spec, settings = draft.ftj, draft.spec, draft.settings
    return spark_manifest.build_manifest(
        ftj,
        spec,
        name,
        driver=_driver(ftj, spec, settings, draft.status.run_id),
        executor=_executor(ftj, spec, settings),
    )


def _job(draft: Draft) -> Json:
    metadata = template.metadata(draft.ftj, names.prep_name(draft.ftj.name), names.PREP)
    driver = _driver(draft.ftj, draft.spec, draft.settings, draft.status.run_id)
    return template.retried_job(metadata, driver, _CONTAINER)
