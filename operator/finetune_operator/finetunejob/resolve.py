"""What a FineTuneJob leaves out, filled in from its name and from the defaults of the installation."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.env import EnvVar
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import Resolved
from finetune_crds.training import LOW_RANK, SOFT_PROMPTS, Checkpoint, Gpu
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.merge import merge

TRAINER = "trainer"
# Few weights that start at zero learn with larger steps. 2e-4: QLoRA (arXiv:2305.14314, table 9); 1e-2: the guide to prefix
# tuning of peft.
_LEARNING_RATES = {**dict.fromkeys(LOW_RANK, 2e-4), **dict.fromkeys(SOFT_PROMPTS, 1e-2)}
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery."""


def resolve(
    spec: FineTuneJobSpec, *, namespace: str, name: str, known: Resolved | None, defaults: Defaults
) -> FineTuneJobSpec:
    """The spec with everything that it leaves to defaults.

    Args:
        known: what was resolved when the job was accepted, which later changes of the installation leave alone; None before.
            Variables and pod templates are always those of the installation now: they count from the next pod on.
    """
    filled = known or _first(spec, namespace, name, defaults)
    parts: dict[str, object] = {
        "data": spec.data,
        "trainer": spec.trainer.model_copy(
            update={
                "env": _env(defaults.env, spec.env, spec.trainer.env),
                "env_from": [*defaults.env_from, *spec.env_from, *spec.trainer.env_from],
            }
        ),
        "checkpoint": filled.checkpoint,
        "training": spec.training.model_copy(
            update={"learning_rate": filled.learning_rate or _learning_rate(spec)}
        ),
        "pod_template": _training_template(spec, defaults),
        "model": spec.model.model_copy(update={"cache": spec.model.cache or defaults.model_cache}),
        "distributed": spec.distributed.model_copy(
            update={"processes_per_node": spec.distributed.ranks_per_node}
        ),
        "run_policy": spec.run_policy.model_copy(
            update={"queue_name": spec.run_policy.queue_name or filled.queue_name}
        ),
    }
    prepare = spec.data.prepare
    if prepare:
        changes = {
            "output": filled.output or "",
            "env": _env(defaults.env, spec.env, prepare.env),
            "env_from": [*defaults.env_from, *spec.env_from, *prepare.env_from],
            "pod_template": merge(_every_pod(spec, defaults), prepare.pod_template) or None,
        }
        parts["data"] = spec.data.model_copy(update={"prepare": prepare.model_copy(update=changes)})
    if spec.register_:
        parts["register_"] = spec.register_.model_copy(update={"model": filled.model})
    return spec.model_copy(update=parts)


def resolved(spec: FineTuneJobSpec, defaults: Defaults) -> Resolved:
    """What stays as it is for the life of a job, of a spec that was resolved.

    Of the queue only that of the installation: `runPolicy.queueName` of the job may change.
    """
    return Resolved(
        output=(spec.data.prepare.output or None) if spec.data.prepare else None,
        checkpoint=spec.checkpoint,
        model=spec.register_.model if spec.register_ else None,
        queue_name=defaults.queue_name,
        learning_rate=spec.training.learning_rate,
    )


def _first(spec: FineTuneJobSpec, namespace: str, name: str, defaults: Defaults) -> Resolved:
    prepare = spec.data.prepare
    return Resolved(
        output=(prepare.output or defaults.folder("splits", namespace, name) or None) if prepare else None,
        checkpoint=_checkpoint(spec, defaults),
        model=(spec.register_.model or name) if spec.register_ else None,
        queue_name=defaults.queue_name,
        learning_rate=_learning_rate(spec),
    )


def _learning_rate(spec: FineTuneJobSpec) -> float:
    """The learning rate of the spec, or the usual one of its method."""
    if "learning_rate" in spec.training.model_fields_set:
        return spec.training.learning_rate
    return _LEARNING_RATES.get(spec.method.type, spec.training.learning_rate)


def _checkpoint(spec: FineTuneJobSpec, defaults: Defaults) -> Checkpoint | None:
    """The checkpoints that the spec asks for; without a word of it, those of the installation if it has storage.

    A command of your own writes its own checkpoints.
    """
    wanted, uri = spec.checkpoint, defaults.folder("checkpoints")
    if wanted is None and (not uri or spec.trainer.command):
        return None
    given = wanted.model_dump(exclude_unset=True) if wanted else {}
    folder = {"uri": uri} if uri else {}
    return Checkpoint.model_validate({**folder, **defaults.checkpoint.model_dump(exclude_none=True), **given})


def _env(*parts: Sequence[EnvVar]) -> list[EnvVar]:
    """The variables of several lists; of equal names the last."""
    return list({variable.name: variable for part in parts for variable in part}.values())


def _training_template(spec: FineTuneJobSpec, defaults: Defaults) -> Json | None:
    """The installation's template under the GPUs of the spec, under the template of the spec."""
    template = merge(_every_pod(spec, defaults), defaults.pod_template)
    for above in (_account(spec), _gpus(spec), spec.pod_template):
        template = merge(template, above)
    return template or None


def _every_pod(spec: FineTuneJobSpec, defaults: Defaults) -> Json:
    """What the pods of preparation and training have alike."""
    secrets = [secret.to_json() for secret in defaults.image_pull_secrets]
    account = spec.service_account_name or defaults.service_account_name
    found: Json = {"imagePullSecrets": secrets} if secrets else {}
    found |= {"serviceAccountName": account} if account else {}
    return {"spec": found} if found else {}


def _account(spec: FineTuneJobSpec) -> Json:
    account = spec.service_account_name
    return {"spec": {"serviceAccountName": account}} if account else {}


def _gpus(spec: FineTuneJobSpec) -> Json:
    wanted = spec.distributed
    if wanted.gpus_per_node is None:
        return {}
    resource = wanted.gpu.resource_name if wanted.gpu else Gpu().resource_name
    limits = {resource: str(wanted.gpus_per_node)}
    found: Json = {"containers": [{"name": TRAINER, "resources": {"limits": limits}}]}
    if wanted.gpu and wanted.gpu.product:
        found["nodeSelector"] = {PRODUCT_LABEL: wanted.gpu.product}
    return {"spec": found}


def gpu_limit(template: Json | None, resource: str) -> int | None:
    """The limit of a resource that a pod template gives the trainer; None without one, or where it is no number."""
    spec = (template or {}).get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for item in containers if isinstance(containers, list) else []:
        if not isinstance(item, dict) or item.get("name") != TRAINER:
            continue
        resources = item.get("resources")
        limits = resources.get("limits") if isinstance(resources, dict) else None
        found = limits.get(resource) if isinstance(limits, dict) else None
        return int(str(found)) if str(found).isdecimal() else None
    return None
