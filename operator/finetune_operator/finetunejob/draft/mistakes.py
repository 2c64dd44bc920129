"""Mistakes in pod templates and resolved values that the schema cannot detect, or for which the API server names no remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finetune_crds.base import Json
from finetune_crds.env import CODE_ENV, EVALUATION_ENV, NO_SCOPE_IN_PODS, RESERVED_ENV
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER, Role
from finetune_crds.sinks import list_reserved_env
from finetune_operator import names
from finetune_operator.databricks import secret_scopes
from finetune_operator.finetunejob.resolve import gpu_limit
from finetune_operator.template_merge import (
    LOST_WITH_POD,
    containers,
    is_below,
    items,
    mounts,
    requested_devices,
)

# The names of main containers in pods. Templates for an earlier version of the operator use them instead of MAIN_CONTAINER.
_OWN_CONTAINERS = (names.PREP_CONTAINER, names.TRAINER_CONTAINER, names.EVALUATE_CONTAINER)


def of_training(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes in the templates of training pods. The API server rejects a template that does not fit the schema of pods."""
    reserved = [
        *RESERVED_ENV,
        *list_reserved_env(spec.tracking.sinks),
        *((CODE_ENV,) if spec.trainer.code else ()),
    ]
    yield from _of_role(spec, "train", reserved)
    yield from _too_few_gpus(spec)
    yield from _lost_output(spec)


def of_preparation(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes in the templates of the pods of the preparation."""
    if spec.prepare:
        yield from _of_role(spec, "prepare", RESERVED_ENV)


def of_evaluation(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes in the templates of the evaluation pod."""
    if spec.evaluation:
        yield from _of_role(
            spec, "evaluate", (*RESERVED_ENV, *list_reserved_env(spec.tracking.sinks), *EVALUATION_ENV)
        )


def of_learning_rate(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes in a resolved learning rate schedule: the default rate depends on the method, so the schema cannot check it."""
    training = spec.training
    floor, peak = training.min_learning_rate, training.learning_rate
    if floor is not None and floor >= peak:
        yield (
            f"spec.training.minLearningRate {floor:g} must be below the learning rate, which defaults to {peak:g} "
            f"for method {spec.method.type}: lower spec.training.minLearningRate, or set spec.training.learningRate"
        )
    steps, decay = training.max_steps, training.decay_steps
    if steps is not None and decay is not None and training.warmup_of(steps) + decay > steps:
        yield (
            f"spec.training.decaySteps {decay} and a warm-up of {training.warmup_of(steps)} steps are longer than maxSteps {steps}: "
            "reduce one of them"
        )


def _of_role(spec: FineTuneJobSpec, role: Role, reserved: Sequence[str]) -> Iterator[str]:
    """Yield the mistakes in the template of a role, and in the template of all pods, which is merged into it."""
    template_of_all = spec.pods.all.template
    of_all = [
        *_devices(template_of_all),
        *_containers(template_of_all),
        *_variables(template_of_all, reserved),
    ]
    yield from (f"spec.pods.all.template {mistake}" for mistake in of_all)
    template = spec.pods.of(role).template
    yield from (
        f"spec.pods.{role}.template {mistake}"
        for mistake in (*_containers(template), *_variables(template, reserved))
        if mistake not in of_all
    )


def _devices(template: Json | None) -> Iterator[str]:
    """Devices for all pods: the preparation has no use for GPUs, and would take them from other jobs."""
    for name in requested_devices(template):
        yield (
            f"requests {name} for all pods: move the limit to the container {MAIN_CONTAINER} in spec.pods.train.template, and in "
            "spec.pods.evaluate.template if the evaluation uses GPUs"
        )


def _containers(template: Json | None) -> Iterator[str]:
    """Containers other than the main container of the role."""
    for item in items(template, "containers"):
        name = item.get("name")
        if not isinstance(name, str) or name == MAIN_CONTAINER:
            continue
        # A container without an image, or with a name of an earlier version, is meant to be the main container.
        if item.get("image") and name not in _OWN_CONTAINERS:
            yield (
                f"has a second container {name!r}, which keeps the pod running after {MAIN_CONTAINER!r} has ended: "
                "move this container to initContainers with restartPolicy: Always"
            )
        else:
            yield f"has the container {name!r}: name it {MAIN_CONTAINER!r}, which stands for the pod's own container"


def _variables(template: Json | None, reserved: Sequence[str]) -> Iterator[str]:
    """Variables of the main container that are reserved, or name a secret that no pod can read."""
    for item in containers(template, MAIN_CONTAINER):
        env = item.get("env")
        variables = [entry for entry in env if isinstance(entry, dict)] if isinstance(env, list) else []
        for entry in variables:
            if isinstance(entry.get("value"), str) and secret_scopes.is_reference(entry["value"]):
                yield f"sets {entry.get('name')} to a secret of a Databricks workspace: {NO_SCOPE_IN_PODS}"
            if entry.get("name") in reserved:
                yield f"sets {entry['name']}, which the operator sets: remove the variable"


def _too_few_gpus(spec: FineTuneJobSpec) -> Iterator[str]:
    """A limit of GPUs in the pod template that is below the number of ranks."""
    distributed = spec.distributed
    resource, ranks = distributed.gpu_resource, distributed.ranks_per_node
    limit = gpu_limit(spec.pods.train.template, resource)
    if limit is None or limit >= ranks or distributed.device == "CPU":
        return
    # If the spec sets gpusPerNode, the operator sets the limit.
    has_gpus_per_node = distributed.gpus_per_node is not None
    remedy = "remove the limit from the template" if has_gpus_per_node else f"raise the limit to {ranks}"
    yield f"each pod has {ranks} processes, and spec.pods.train.template limits it to {limit} {resource}: {remedy}"


def _lost_output(spec: FineTuneJobSpec) -> Iterator[str]:
    """An output folder that is lost with the pod."""
    uri = spec.output.uri if spec.output else ""
    # NB: a volume of Unity Catalog outlives the pods, and they need no mount for it.
    if not uri.startswith("/") or uri.startswith("/Volumes/"):
        return
    lasting_mounts = mounts(spec.pods.train.template, MAIN_CONTAINER, but=LOST_WITH_POD)
    if not any(is_below(uri, mount) for mount in lasting_mounts):
        yield (
            f"spec.output.uri {uri} is lost with the pod: mount a PersistentVolumeClaim there in the container "
            f"{MAIN_CONTAINER} of spec.pods.train.template, or create a FineTuneJob with another name and a folder of an object store"
        )
