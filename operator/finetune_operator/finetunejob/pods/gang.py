"""The children of a training attempt: the headless Service, the ConfigMap with the recipe, the NetworkPolicy, and the Indexed Job."""

from __future__ import annotations

from finetune_crds import JobRecipe, contract
from finetune_crds.base import Json
from finetune_crds.checkpoint import ResumeFrom
from finetune_crds.data import Splits
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.recipe import as_yaml
from finetune_crds.trainer import Trainer
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import (
    memory_reduction,
    network_policy,
    own_code,
    own_output,
    probing,
    queueing,
    rendezvous,
    template,
    workspace,
)
from finetune_operator.finetunejob.pods.step_state import Step
from finetune_operator.template_merge import merge

CONTAINER = names.TRAINER_CONTAINER
BUILT_IN_COMMAND = ["finetune-train"]
# The part of the grace period that torchrun needs after its workers have exited.
_TORCHRUN_SECONDS = 10


def build_step(draft: Draft, attempt: int) -> Step:
    """The step of one attempt."""
    distributed = draft.spec.distributed
    end_times = [item.end_time for item in draft.status.attempts or [] if item.attempt == attempt]
    return Step(
        names.TRAIN,
        names.train_name(draft.ftj.name, attempt),
        CONTAINER,
        nodes=distributed.nodes,
        attempt=attempt,
        last_end=max(end_times, default=None),
        ranks_per_node=distributed.ranks_per_node,
        use_less=_describe_host_remedy(draft),
    )


def _describe_host_remedy(draft: Draft) -> str:
    """What to do about a lack of host memory, besides a higher limit; empty if nothing else helps."""
    if draft.spec.trainer.command:
        return "reduce the memory that your command uses"
    # NB: on GPUs, the host memory does not depend on the batch size.
    if memory_reduction.has_gpus(draft):
        return ""
    training = memory_reduction.apply_to_training(draft.spec.training, draft.status.reduced_memory)
    field = "perDeviceBatchSize" if training.per_device_batch_size > 1 else "maxLength"
    return f"create a FineTuneJob with another name and a lower training.{field}"


def companions(draft: Draft) -> list[tuple[str, str]]:
    """Kind and name of the Service, the ConfigMap and the NetworkPolicy, which every attempt uses."""
    job = draft.ftj.name
    return [
        ("Service", names.service_name(job)),
        ("ConfigMap", names.train_config_name(job)),
        *network_policy.companions(draft),
    ]


def build_companions(draft: Draft) -> list[Json]:
    """The Service, the ConfigMap and the NetworkPolicy, which every attempt uses."""
    return [_build_service(draft), build_recipe(draft), *network_policy.build_companions(draft)]


def _build_service(draft: Draft) -> Json:
    """The headless Service whose name is the domain of the pods."""
    ftj, ports = draft.ftj, {"rendezvous": draft.spec.distributed.port}
    return template.build_headless_service(ftj, names.service_name(ftj.name), names.TRAIN, ports)


def build_prepared_recipe(draft: Draft) -> JobRecipe:
    """The recipe after the preparation: `data` names the prepared table and, if the spec names no columns, the detected columns."""
    ftj, data = draft.ftj, draft.status.data
    recipe = JobRecipe.of(ftj.reference, draft.spec)
    if data is None or data.path is None or recipe.data is None:
        return recipe
    splits = Splits(type="Delta", path=data.path, version=data.version)
    columns = recipe.data.columns or data.columns
    prepared_data = recipe.data.model_copy(update={"splits": splits, "columns": columns})
    return recipe.model_copy(update={"data": prepared_data, "prepared": data})


def build_recipe(draft: Draft) -> Json:
    """The ConfigMap with the recipe, and with the parameters of a custom command."""
    ftj, trainer = draft.ftj, draft.spec.trainer
    recipe = _set_resumed_checkpoint(draft, build_prepared_recipe(draft))
    recipe = memory_reduction.apply_to_recipe(draft, recipe)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": template.metadata(ftj, names.train_config_name(ftj.name), names.TRAIN),
        "data": {
            contract.RECIPE_FILE: recipe.to_yaml(),
            **({contract.PARAMETERS_FILE: as_yaml(trainer.parameters)} if trainer.command else {}),
            **own_code.files(trainer),
            **own_output.files(draft.spec),
        },
    }


def _set_resumed_checkpoint(draft: Draft, recipe: JobRecipe) -> JobRecipe:
    """The recipe with checkpoint.resumeFrom replaced by the URI in the status."""
    resumed_from = draft.status.resumed_from
    if recipe.checkpoint is None or resumed_from is None:
        return recipe
    resume_from = ResumeFrom(type="Uri", uri=resumed_from.uri)
    checkpoint = recipe.checkpoint.model_copy(update={"resume_from": resume_from})
    return recipe.model_copy(update={"checkpoint": checkpoint})


def build_job(draft: Draft, attempt: int) -> Json:
    """The Indexed Job of one attempt. If one pod fails, all end. For a Job that begins with one pod, see `probing`."""
    ftj, spec = draft.ftj, draft.spec
    name = names.train_name(ftj.name, attempt)
    nodes = spec.distributed.nodes
    body: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": template.metadata(ftj, name, names.TRAIN, attempt),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": failure_rules(
                    spec.run_policy.fatal_exit_codes, has_queue=bool(spec.run_policy.queue_name)
                )
            },
            "template": _build_pod_template(draft, attempt),
        },
    }
    if probing.begins_with_one_pod(draft, attempt):
        body = probing.begin_with_one_pod(body)
    return queueing.enqueue(draft, body)


def failure_rules(fatal: list[int], *, has_queue: bool) -> list[Json]:
    """The podFailurePolicy: every rule fails the whole gang, and the Job's message names the rule that matched.

    NB: without a rule, a failed pod fails the gang too, because of backoffLimit 0. Unlike that limit, a rule also counts pods that a
    suspension of the Job stopped, whatever their exit code is, and their Job must keep its place in the queue. So a Job in a queue has no
    rule for exit codes.
    """
    disruption = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    if has_queue:
        return [disruption]
    # If the user lists EXIT_PREEMPTED as fatal, only the rule of the fatal codes has it.
    preempted = [] if contract.EXIT_PREEMPTED in fatal else [contract.EXIT_PREEMPTED]
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(set(codes))},
        }
        for codes in (preempted, fatal)
        if codes
    ]
    return [disruption, *rules]


def _build_pod_template(draft: Draft, attempt: int) -> Json:
    """The template of the training pods of an attempt."""
    ftj, spec, settings = draft.ftj, draft.spec, draft.settings
    trainer, login = spec.trainer, workspace.pod_login(spec, settings, CONTAINER)
    pods = spec.pods.train
    pod = template.pod_template(
        container=CONTAINER,
        image=pods.image or settings.trainer_image,
        is_product_image=pods.image is None,
        pull_policy=settings.trainer_pull_policy,
        user=settings.pod_user,
        command=trainer.command or BUILT_IN_COMMAND,
        args=trainer.args,
        # `login` already has what the pod needs from the Secret.
        secret=None if login else spec.tracking.secret_of_pods,
        contract_env=[
            *rendezvous.rendezvous_env(ftj, attempt, spec.distributed),
            *rendezvous.run_env(
                servers=settings.servers(spec.tracking),
                run_id=draft.status.run_id,
            ),
            *rendezvous.sink_env(ftj, spec.tracking),
            *_command_env(trainer),
            {"name": contract.ENV_ATTEMPT, "value": str(attempt)},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_seconds_to_save(pods.template))},
        ],
        config_map=names.train_config_name(ftj.name),
        model_cache=spec.model_cache,
        pod_labels=template.labels(ftj, names.TRAIN, attempt),
        subdomain=names.service_name(ftj.name),
        user_template=_mount_code(draft),
        node_lost_seconds=spec.distributed.node_lost_seconds,
    )
    pod = queueing.add_default_requests(draft, dict(merge(pod, login)), CONTAINER)
    pod = own_code.add_init_containers(draft, pod)
    pod = own_output.add_upload(draft, pod, _seconds_to_save(pods.template))
    pod["spec"].setdefault("topologySpreadConstraints", [_spread(draft, attempt)])
    return pod


def _command_env(trainer: Trainer) -> list[Json]:
    if not trainer.command:
        return []
    return rendezvous.command_env(trainer.code.mount_path if trainer.code else None)


def _seconds_to_save(user_template: Json | None) -> int:
    """Seconds that workers have after SIGTERM; torchrun's default of 30 s is too short to save a large model."""
    return max(template.grace_seconds(user_template) - _TORCHRUN_SECONDS, 1)


def _spread(draft: Draft, attempt: int) -> Json:
    """The constraint by which the scheduler prefers a separate node for each pod of an attempt."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.LABEL_UID: draft.ftj.uid, names.LABEL_ATTEMPT: str(attempt)}},
    }


def _mount_code(draft: Draft) -> Json | None:
    """The template of spec.pods.train with trainer.code mounted.

    The code is in a volume of the template, in a ConfigMap, or in an emptyDir into which a commit is checked out. A volume of the
    template with the name of this emptyDir replaces the emptyDir.
    """
    code, user_template = draft.spec.trainer.code, draft.spec.pods.train.template
    if code is None:
        return user_template
    name = code.volume or contract.CODE_VOLUME
    # Only a checkout needs to write.
    mount = {"name": name, "mountPath": code.mount_path, "readOnly": code.git is None}
    spec: Json = {
        "containers": [{"name": MAIN_CONTAINER, "workingDir": code.mount_path, "volumeMounts": [mount]}]
    }
    if code.config_map_ref:
        spec["volumes"] = [{"name": name, "configMap": code.config_map_ref.to_json()}]
    checkout = {"name": name, "emptyDir": {"sizeLimit": own_code.CHECKOUT_LIMIT}}
    volume: Json = {"spec": {"volumes": [checkout]}} if code.git else {}
    return dict(merge(merge(volume, user_template), {"spec": spec}))
