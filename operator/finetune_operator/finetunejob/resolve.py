"""Fills in the fields that a FineTuneJob leaves out, from its name and from the defaults of the chart."""

from __future__ import annotations

from finetune_crds import tables
from finetune_crds.base import Json
from finetune_crds.catalog import Catalog
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER, ROLES, Pods, Role, RolePodSettings
from finetune_crds.preparation import settings_digest
from finetune_crds.status import Pinned, Resolved
from finetune_crds.training import LOW_RANK_METHODS, SOFT_PROMPT_METHODS, Model
from finetune_operator.batch.pod_settings import as_template, build_pull_secrets, merge_templates
from finetune_operator.defaults import Defaults
from finetune_operator.template_merge import containers

# Methods with few weights, which start at zero, need a higher learning rate. 2e-4: QLoRA (arXiv:2305.14314, table 9); 1e-2: peft's
# guide to prefix tuning.
_LEARNING_RATES = {**dict.fromkeys(LOW_RANK_METHODS, 2e-4), **dict.fromkeys(SOFT_PROMPT_METHODS, 1e-2)}
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery."""


def resolve(
    spec: FineTuneJobSpec, *, namespace: str, name: str, earlier: Resolved | None, defaults: Defaults
) -> FineTuneJobSpec:
    """The spec with all defaults filled in.

    Args:
        earlier: the values that were resolved when the job was accepted; later changes of the installation do not affect them. None
            if the job is not accepted yet. Pod settings always come from the current installation, and apply from the next pod on.
    """
    filled = earlier or resolved(spec, namespace=namespace, name=name, defaults=defaults)
    # NB: an empty name keeps the job out of the default queue.
    job_queue = spec.run_policy.queue_name
    parts: dict[str, object] = {
        "pods": merged_pods(spec, defaults),
        "data": spec.data,
        "checkpoint": filled.checkpoint,
        "training": spec.training.model_copy(
            update={"learning_rate": filled.learning_rate or _resolve_learning_rate(spec)}
        ),
        "model": _with_cache(spec.model, defaults),
        "distributed": spec.distributed.model_copy(
            update={"processes_per_node": spec.distributed.ranks_per_node}
        ),
        "run_policy": spec.run_policy.model_copy(
            update={"queue_name": filled.queue_name if job_queue is None else job_queue}
        ),
    }
    data, prepare = spec.data, spec.prepare
    if data and prepare:
        changes = {"output": filled.output or "", "catalog": filled.catalog}
        parts["data"] = data.model_copy(update={"prepare": prepare.model_copy(update=changes)})
    if spec.register_:
        parts["register_"] = spec.register_.model_copy(update={"model": filled.model})
    return spec.model_copy(update=parts)


def pinned(spec: FineTuneJobSpec, pins: Pinned | None) -> FineTuneJobSpec:
    """The spec with the versions that its aliases pointed at when the job began."""
    parts: dict[str, object] = {}
    if pins and pins.base and spec.model:
        parts["model"] = spec.model.model_copy(update={"base": pins.base})
    if pins and pins.teacher and spec.objective.distillation:
        distillation = spec.objective.distillation.model_copy(update={"teacher": pins.teacher})
        parts["objective"] = spec.objective.model_copy(update={"distillation": distillation})
    return spec.model_copy(update=parts) if parts else spec


def resolved(spec: FineTuneJobSpec, *, namespace: str, name: str, defaults: Defaults) -> Resolved:
    """The values that stay the same for the life of a job. A resolved spec gives the same values again.

    `queue_name` is the chart's default queue only, since `runPolicy.queueName` of the job can change.
    """
    return Resolved(
        output=_resolve_output(spec, namespace, name, defaults),
        catalog=_resolve_catalog(spec, defaults),
        checkpoint=_resolve_checkpoint(spec, defaults),
        model=(spec.register_.model or name) if spec.register_ else None,
        queue_name=defaults.queue_name,
        learning_rate=None if spec.trainer.command else _resolve_learning_rate(spec),
    )


def _resolve_catalog(spec: FineTuneJobSpec, defaults: Defaults) -> Catalog | None:
    """Return the catalog of the spec or, for a preparation in this cluster that names tables, the chart's default catalog."""
    data, prepare = spec.data, spec.prepare
    if data is None or prepare is None:
        return None
    if prepare.catalog:
        return prepare.catalog
    reads_named_tables = not prepare.spark.has_catalog and any(tables.list_tables(data))
    return defaults.catalog if reads_named_tables else None


def _resolve_output(spec: FineTuneJobSpec, namespace: str, name: str, defaults: Defaults) -> str | None:
    """Return the output in the spec or a folder in the chart's storage, for example s3://bucket/splits/NAMESPACE/DIGEST.

    Jobs with the same preparation share the folder; with reuse Never, the folder has the job's name.
    """
    data, prepare = spec.data, spec.prepare
    if data is None or prepare is None:
        return None
    if prepare.output or spec.model is None:
        return prepare.output
    is_shared = prepare.reuse != "Never"
    # NB: the digest covers the settings that the prep pod gets, which include the chart's default catalog.
    with_catalog = prepare.model_copy(update={"catalog": _resolve_catalog(spec, defaults)})
    prepared_data = data.model_copy(update={"prepare": with_catalog})
    folder = settings_digest(prepared_data, spec.model, spec.objective) if is_shared else name
    return defaults.folder("splits", namespace, folder) or None


def _with_cache(model: Model | None, defaults: Defaults) -> Model | None:
    """Return the model of the spec; a model without a cache gets the chart's default cache."""
    return model.model_copy(update={"cache": model.cache or defaults.model_cache}) if model else None


def _resolve_learning_rate(spec: FineTuneJobSpec) -> float:
    """The learning rate of the spec, or the usual rate of its method."""
    if "learning_rate" in spec.training.model_fields_set:
        return spec.training.learning_rate
    return _LEARNING_RATES.get(spec.method.type, spec.training.learning_rate)


def _resolve_checkpoint(spec: FineTuneJobSpec, defaults: Defaults) -> Checkpoint | None:
    """Return the checkpoint settings of the spec with the chart's defaults; None without settings and storage.

    A job with a custom command gets no defaults unless it sets spec.checkpoint: the command writes its own checkpoints.
    """
    checkpoint, uri = spec.checkpoint, defaults.folder("checkpoints")
    if checkpoint is None and (not uri or spec.trainer.command):
        return None
    explicit_fields = checkpoint.model_dump(exclude_unset=True) if checkpoint else {}
    folder = {"uri": uri} if uri else {}
    return Checkpoint.model_validate(
        {**folder, **defaults.checkpoint.model_dump(exclude_none=True), **explicit_fields}
    )


def merged_pods(spec: FineTuneJobSpec, defaults: Defaults) -> Pods:
    """Return the image and the template of each role, merged from the chart's defaults and the job's settings.

    Each template includes the role's variables and its ServiceAccount. `all` stays as the job has it.
    """
    return spec.pods.model_copy(update={role: _merge_role(role, spec, defaults) for role in ROLES})


def _merge_role(role: Role, spec: FineTuneJobSpec, defaults: Defaults) -> RolePodSettings:
    """Return the settings of a role. Settings of the job take precedence over those of the chart, and settings of the role over `all`.

    The number of GPUs in spec.distributed overrides `all`, and the job's settings of the role override this number.
    """
    default_pods, job_pods = defaults.pods, spec.pods
    template = merge_templates(
        build_pull_secrets(defaults),
        as_template(default_pods.all),
        as_template(default_pods.of(role)),
        as_template(job_pods.all),
        _build_gpu_limits(spec) if role == "train" else None,
        as_template(job_pods.of(role)),
    )
    image = job_pods.of(role).image or default_pods.of(role).image
    return RolePodSettings(image=image, template=template)


def _build_gpu_limits(spec: FineTuneJobSpec) -> Json:
    distributed = spec.distributed
    if distributed.gpus_per_node is None:
        return {}
    limits = {distributed.gpu_resource: str(distributed.gpus_per_node)}
    gpu_spec: Json = {"containers": [{"name": MAIN_CONTAINER, "resources": {"limits": limits}}]}
    if distributed.gpu and distributed.gpu.product:
        gpu_spec["nodeSelector"] = {PRODUCT_LABEL: distributed.gpu.product}
    return {"spec": gpu_spec}


def gpu_limit(template: Json | None, resource: str) -> int | None:
    """The limit of a resource in the main container of a pod template; None without a limit, or if it is not a whole number."""
    for item in containers(template, MAIN_CONTAINER):
        resources = item.get("resources")
        limits = resources.get("limits") if isinstance(resources, dict) else None
        return whole_number(limits.get(resource)) if isinstance(limits, dict) else None
    return None


def whole_number(value: object) -> int | None:
    """A quantity of an extended resource as a number, from a number or text; None if it is not a whole number."""
    text = str(value)
    return int(text) if text.isdecimal() else None
