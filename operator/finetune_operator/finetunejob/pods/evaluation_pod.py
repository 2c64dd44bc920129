"""The children of an evaluation: a ConfigMap with the recipe, and a Job of one pod."""

from __future__ import annotations

import hashlib
import json

from finetune_crds import JobRecipe, contract
from finetune_crds.base import Json
from finetune_crds.evaluation import Evaluation
from finetune_crds.recipe import as_yaml
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import gang, queueing, rendezvous, template, workspace
from finetune_operator.finetunejob.pods.step_state import Step
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.template_merge import merge

CONTAINER = names.EVALUATE_CONTAINER
# The variables by which a custom command finds the model and the file for its metrics. This file is the termination message, in
# which the operator reads the metrics.
_PATH_VARIABLES: list[Json] = [
    {"name": contract.ENV_MODEL_PATH, "value": contract.MODEL_PATH},
    {"name": contract.ENV_METRICS_PATH, "value": contract.TERMINATION_PATH},
]


def build_step(draft: Draft) -> Step:
    """The step of the evaluation."""
    name = names.evaluate_name(draft.ftj.name)
    use_less = "create a FineTuneJob with another name and a lower evaluation.batchSize"
    return Step(names.EVALUATE, name, CONTAINER, use_less=use_less)


def evaluation_of(draft: Draft) -> Evaluation:
    """The evaluation of the spec.

    Raises:
        ValueError: the spec has no evaluation.
    """
    if draft.spec.evaluation is None:
        raise ValueError(f"{draft.ftj.key} has nothing to evaluate")
    return draft.spec.evaluation


def build_recipe(draft: Draft, version: RegisteredVersion) -> Json:
    """The ConfigMap with the recipe. The parameters of a custom command are in the recipe and in a separate file."""
    evaluation = evaluation_of(draft)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": template.metadata(draft.ftj, names.evaluate_name(draft.ftj.name), names.EVALUATE),
        "data": {
            contract.RECIPE_FILE: _build_job_recipe(draft, version).to_yaml(),
            **({contract.PARAMETERS_FILE: as_yaml(evaluation.parameters)} if evaluation.command else {}),
        },
    }


def _build_job_recipe(draft: Draft, version: RegisteredVersion) -> JobRecipe:
    """The recipe of the training, with Delta tables pinned to the versions that the training read, and what only an evaluation has."""
    recipe, evaluation = gang.build_prepared_recipe(draft), evaluation_of(draft)
    data = recipe.data
    splits = data.splits if data else None
    # The training recorded the versions of the tables as a tag of the model's version. The tables may have newer versions.
    if data and splits:
        pinned_splits = splits.pin(version.tags.get(contract.TAG_DATA_VERSION, ""))
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"splits": pinned_splits})})
    update: dict[str, object] = {"metrics_step": step_after_training(draft)}
    if recipe.checkpoint:
        # An evaluation reads no checkpoints, and a pod cannot look up another job.
        update["checkpoint"] = recipe.checkpoint.model_copy(update={"resume_from": None})
    if evaluation.command:
        update["parameters"] = evaluation.parameters
    return recipe.model_copy(update=update)


def step_after_training(draft: Draft) -> int:
    """The step of the evaluation's metrics. NB: trackers show the value of the latest step, and the training may have logged the same metric."""
    return (draft.status.progress.step if draft.status.progress else 0) + 1


def build_job(draft: Draft, version: RegisteredVersion) -> Json:
    """The Job that evaluates a version, with one pod."""
    metadata = template.metadata(draft.ftj, names.evaluate_name(draft.ftj.name), names.EVALUATE)
    metadata["annotations"] = {names.ANNOTATION_VERSION: version.version}
    if evaluation_of(draft).command:
        metadata["annotations"][names.ANNOTATION_DIGEST] = _compute_digest(draft, version)
    fetch_containers = [names.FETCH_CONTAINER] if evaluation_of(draft).command else []
    pod = _build_pod(draft, f"models:/{version.name}/{version.version}")
    return queueing.enqueue(draft, template.retried_job(metadata, pod, *fetch_containers, CONTAINER))


def _compute_digest(draft: Draft, version: RegisteredVersion) -> str:
    """Return a hash of all inputs of a custom command except the model: 12 hex digits of a SHA-256."""
    evaluation = evaluation_of(draft)
    content = {
        "image": _choose_image(draft),
        "command": evaluation.command,
        "args": evaluation.args,
        "parameters": evaluation.parameters,
        "split": evaluation.split,
        "data": _identify_data(draft, version),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _identify_data(draft: Draft, version: RegisteredVersion) -> Json | str:
    """Return what identifies the rows: the preparation's digest, which tables with equal rows share; without it, the data of the recipe."""
    prepared, data = draft.status.data, _build_job_recipe(draft, version).data
    if prepared and prepared.digest:
        return prepared.digest
    if data is None:
        return {}
    return data.splits.to_json() if data.splits else data.to_json()


def _choose_image(draft: Draft) -> str:
    """Return the image of spec.pods.evaluate; else, for a custom command, the image of spec.pods.train; else `_choose_built_in_image`."""
    evaluation = evaluation_of(draft)
    training_image = draft.spec.pods.train.image if evaluation.command else None
    return draft.spec.pods.evaluate.image or training_image or _choose_built_in_image(draft)


def _choose_built_in_image(draft: Draft) -> str:
    """Return an image with finetune-evaluate: the training image, or the product's image if a custom command trains."""
    training_image = None if draft.spec.trainer.command else draft.spec.pods.train.image
    return training_image or draft.settings.trainer_image


def _build_pod(draft: Draft, uri: str) -> Json:
    evaluation, spec, settings = evaluation_of(draft), draft.spec, draft.settings
    login = workspace.pod_login(spec, settings, CONTAINER)
    image = _choose_image(draft)
    run_variables = rendezvous.run_env(servers=settings.servers(spec.tracking), run_id=draft.status.run_id)
    command_variables = [*rendezvous.command_env(), *_PATH_VARIABLES] if evaluation.command else []
    pod = template.pod_template(
        container=CONTAINER,
        image=image,
        is_product_image=image == settings.trainer_image,
        pull_policy=settings.trainer_pull_policy,
        user=settings.pod_user,
        command=evaluation.command or [contract.EVALUATE_COMMAND],
        args=evaluation.args if evaluation.command else [contract.EVALUATE_MODEL, uri],
        secret=None if login else spec.tracking.secret_of_pods,
        contract_env=[*run_variables, *rendezvous.sink_env(draft.ftj, spec.tracking), *command_variables],
        config_map=names.evaluate_name(draft.ftj.name),
        model_cache=spec.model_cache,
        pod_labels=template.labels(draft.ftj, names.EVALUATE),
        subdomain=None,
        user_template=spec.pods.evaluate.template,
        node_lost_seconds=spec.distributed.node_lost_seconds,
    )
    pod = queueing.add_default_requests(draft, dict(merge(pod, login)), CONTAINER)
    return _add_model(draft, pod, uri) if evaluation.command else pod


def _add_model(draft: Draft, pod: Json, uri: str) -> Json:
    """Add an init container that fetches the model before a custom command runs.

    A volume with the same name in the pod template replaces the emptyDir.
    """
    mount = {"name": contract.MODEL_VOLUME, "mountPath": contract.MODEL_PATH}
    main = {"name": CONTAINER, "volumeMounts": [mount], "terminationMessagePath": contract.TERMINATION_PATH}
    volume: Json = {"spec": {"volumes": [{"name": contract.MODEL_VOLUME, "emptyDir": {}}]}}
    with_volume = dict(merge(merge(volume, pod), {"spec": {"containers": [main]}}))
    # An image with finetune-evaluate counts as a product image, even if the job names it.
    fetch = {
        **template.init_container_fields(with_volume, CONTAINER, is_product_image=True),
        "name": names.FETCH_CONTAINER,
        "image": _choose_built_in_image(draft),
        "command": [contract.EVALUATE_COMMAND],
        "args": [contract.EVALUATE_MODEL, uri, contract.EVALUATE_FETCH],
    }
    return dict(merge(with_volume, {"spec": {"initContainers": [fetch]}}))
