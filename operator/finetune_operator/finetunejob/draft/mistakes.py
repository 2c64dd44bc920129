"""Mistakes in pod templates and below defaults that neither the schema nor, in words that help, the API server can tell of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finetune_crds.base import Json
from finetune_crds.env import CODE_ENV, EVALUATION_ENV, NO_SCOPE_IN_PODS, RESERVED_ENV
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.resolve import gpu_limit
from finetune_operator.finetunejob.template_merge import LOST_WITH_POD, containers, is_below, items, mounts
from finetune_operator.policy import secret_scopes


def of_training(spec: FineTuneJobSpec) -> Iterator[str]:
    """What is wrong with `spec.podTemplate`. What is no pod template at all is left for the API server to refuse."""
    reserved = (*RESERVED_ENV, CODE_ENV) if spec.trainer.code else RESERVED_ENV
    yield from _of_template("spec.podTemplate", spec.pod_template, names.TRAINER_CONTAINER, reserved)
    yield from _too_few_gpus(spec)
    yield from _lost_output(spec)


def of_preparation(spec: FineTuneJobSpec) -> Iterator[str]:
    """What is wrong with `spec.data.prepare.podTemplate`."""
    if spec.prepare:
        template = spec.prepare.pod_template
        yield from _of_template("spec.data.prepare.podTemplate", template, names.PREP_CONTAINER)


def of_evaluation(spec: FineTuneJobSpec) -> Iterator[str]:
    """What is wrong with `spec.evaluation.podTemplate`."""
    if spec.evaluation:
        field, template = "spec.evaluation.podTemplate", spec.evaluation.pod_template
        yield from _of_template(field, template, names.EVALUATE_CONTAINER, (*RESERVED_ENV, *EVALUATION_ENV))


def of_learning_rate(spec: FineTuneJobSpec) -> Iterator[str]:
    """What is wrong with the learning rate of a resolved spec: its default is that of the method, which the schema does not know."""
    training = spec.training
    floor, peak = training.min_learning_rate, training.learning_rate
    if floor is not None and floor >= peak:
        yield (
            f"spec.training.minLearningRate {floor:g} is not below the learning rate, by default {peak:g} for method "
            f"{spec.method.type}: use a lower one, or set spec.training.learningRate"
        )
    steps, decay = training.max_steps, training.decay_steps
    if steps is not None and decay is not None and training.warmup_of(steps) + decay > steps:
        yield (
            f"spec.training.decaySteps {decay} and a warm-up of {training.warmup_of(steps)} steps are longer than maxSteps {steps}: "
            "use less of either"
        )


def _of_template(
    field: str, template: Json | None, container: str, reserved: Sequence[str] = RESERVED_ENV
) -> Iterator[str]:
    yield from _variables(field, template, container, reserved)
    for item in items(template, "containers"):
        name = item.get("name")
        if not isinstance(name, str) or name == container:
            continue
        if item.get("image"):
            yield (
                f"{field} has the container {name!r} beside {container!r}, and the pod would not end before it does: move it to "
                f"initContainers with restartPolicy: Always, where it runs until {container!r} has ended"
            )
        else:
            yield (
                f"{field} has the container {name!r} without an image: rename it to {container!r}, the container that the "
                "operator fills in"
            )


def _variables(field: str, template: Json | None, container: str, reserved: Sequence[str]) -> Iterator[str]:
    """Variables of the main container that are reserved, or name a secret that no pod can read."""
    for item in containers(template, container):
        env = item.get("env")
        variables = [entry for entry in env if isinstance(entry, dict)] if isinstance(env, list) else []
        for entry in variables:
            if isinstance(entry.get("value"), str) and secret_scopes.is_reference(entry["value"]):
                yield f"{field} sets {entry.get('name')} to a secret of a Databricks workspace: {NO_SCOPE_IN_PODS}"
        reserved_names = [entry["name"] for entry in variables if entry.get("name") in reserved]
        if reserved_names:
            yield f"{field} sets {', '.join(reserved_names)}, which the operator sets: remove it"


def _too_few_gpus(spec: FineTuneJobSpec) -> Iterator[str]:
    """A limit of GPUs in the pod template that is below the number of ranks."""
    distributed = spec.distributed
    resource, ranks = distributed.gpu_resource, distributed.ranks_per_node
    limit = gpu_limit(spec.pod_template, resource)
    if limit is None or limit >= ranks or distributed.device == "CPU":
        return
    is_set = distributed.gpus_per_node is not None
    remedy = "remove the limit from the template" if is_set else f"raise the limit to {ranks}"
    yield f"each pod has {ranks} processes and spec.podTemplate limits it to {limit} {resource}: {remedy}"


def _lost_output(spec: FineTuneJobSpec) -> Iterator[str]:
    """A folder for the model in the file system of the pod itself."""
    uri = spec.output.uri if spec.output else ""
    # NB: what is in a volume of Unity Catalog outlives the pods, which need no mount for it.
    if not uri.startswith("/") or uri.startswith("/Volumes/"):
        return
    lasting_mounts = mounts(spec.pod_template, names.TRAINER_CONTAINER, but=LOST_WITH_POD)
    if not any(is_below(uri, mount) for mount in lasting_mounts):
        yield (
            f"spec.output.uri {uri} is on no volume that outlives the pods: mount a PersistentVolumeClaim there in the container "
            f"{names.TRAINER_CONTAINER} of spec.podTemplate, or apply a job with another name and a folder of an object store"
        )
