"""The pods of a preparation in this cluster: the driver, the template of Spark's executors, and mistakes in them.

Mistakes are checked when a job is accepted, and again before its pods are created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from finetune_crds import JobRecipe, contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import LocalReference
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.draft import mistakes
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import rendezvous, template, workspace
from finetune_operator.finetunejob.pods.secret_env import build_login
from finetune_operator.finetunejob.preparation import catalog, executors
from finetune_operator.settings import Settings
from finetune_operator.template_merge import merge

# A Secret with a login to MLflow has some of these keys.
_LOGIN_KEYS = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_INSECURE_TLS",
)
_CONTAINER = names.PREP_CONTAINER


def find_mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes, which can be corrected, in the pods of a driver and its executors."""
    yield from mistakes.of_preparation(spec)
    yield from executors.find_unshared_folders(spec)


def wait_for_correction(draft: Draft, pod_mistakes: Iterable[str]) -> bool:
    """Report mistakes in the pods of the preparation, and return whether the preparation waits for their correction.

    NB: the template may have changed since the job was accepted.
    """
    mistakes_text = "; ".join(pod_mistakes)
    if mistakes_text:
        reason = ConditionReason.POD_TEMPLATE_INVALID
        draft.set(ConditionType.PODS_HEALTHY, False, reason, mistakes_text)
        message = "the preparation waits for a correction of spec.pods"
        draft.set(ConditionType.PREPARED, False, reason, message)
    return bool(mistakes_text)


def build_recipe(draft: Draft) -> Json:
    """The ConfigMap with the recipe."""
    ftj = draft.ftj
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": template.metadata(ftj, names.prep_name(ftj.name), names.PREP),
        "data": {contract.RECIPE_FILE: JobRecipe.of(ftj.reference, draft.spec).to_yaml()},
    }


def build_driver(draft: Draft, driver_env: list[Json]) -> Json:
    """The template of the pod that drives Spark: the prep pod.

    Args:
        driver_env: the variables with the driver's settings for its executors.
    """
    spec, settings = draft.spec, draft.settings
    run_env = rendezvous.run_env(servers=settings.servers(spec.tracking), run_id=draft.status.run_id)
    login = workspace.pod_login(spec, settings, _CONTAINER)
    # The login to a workspace includes the keys of the Secret that pods may have.
    secret = None if login else spec.tracking.secret_of_pods
    has_token = executors.count_executors(spec) > 0
    # NB: a driver with an API token does not get whatever the Secret has, which could be a variable that loads code, such as PYTHONPATH.
    secret_env = build_login(secret.name, _LOGIN_KEYS) if secret and has_token else []
    pod = _build_pod(
        draft.ftj,
        spec,
        settings,
        secret=None if has_token else secret,
        contract_env=[*secret_env, *run_env, *driver_env],
    )
    pod = dict(merge(merge(pod, login), catalog.login(spec, settings, _CONTAINER)))
    return executors.as_driver(pod, spec) if executors.count_executors(spec) else pod


def build_executor(ftj: FineTuneJob, spec: FineTuneJobSpec, settings: Settings) -> Json:
    """The pod of an executor.

    NB: executors send no requests to MLflow, so they do not get its credentials.
    """
    return executors.as_executor(ftj, _build_pod(ftj, spec, settings, secret=None, contract_env=[]), spec)


def build_executor_trial(ftj: FineTuneJob, settings: Settings) -> Json:
    """An executor's pod for a dry run.

    Raises:
        ValueError: the job has no spec, or nothing to prepare.
    """
    if ftj.spec is None:
        raise ValueError(f"{ftj.key} has no spec that can be read")
    return executors.build_trial_pod(build_executor(ftj, ftj.spec, settings), ftj)


def build_access_reviews(draft: Draft) -> list[Json]:
    """Build the review of whether the driver is allowed to create executors; empty if Spark runs without executors."""
    spec = draft.spec
    return [executors.build_access_review(draft.ftj, spec)] if executors.count_executors(spec) else []


def _build_pod(
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
        is_product_image=pods.image is None,
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
        node_lost_seconds=spec.distributed.node_lost_seconds,
    )
