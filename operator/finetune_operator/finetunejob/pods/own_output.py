"""The container that uploads what a custom command leaves in `output.from`.

It is a native sidecar (an init container that restarts) with the product's trainer image, since the user's image cannot write to object
stores. The command runs under `output_runner`, which ends when the upload does, so that the pod waits for the upload, however long it
takes, and the attempt fails if the upload does.
"""

from __future__ import annotations

import inspect

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import output_runner, template
from finetune_operator.template_merge import containers, is_below, items, merge, mounts

# Read once: a decision reads no files.
_RUNNER = inspect.getsource(output_runner)
_SCRIPT = ["python3", f"{contract.RECIPE_DIRECTORY}/{contract.OUTPUT_FILE}"]
_MOUNT: Json = {"name": contract.UPLOAD_VOLUME, "mountPath": contract.UPLOAD_PATH}
# What the container of the upload may use. Clients of object stores keep several parts of a file in memory.
_MEMORY = "1Gi"
_CPU_REQUEST = "100m"
# The volume by which both containers wait for each other has three empty files, or a termination message.
_SIGNALS_LIMIT = "16Mi"
# Limits that the container gets if the command's container has them, since a quota can require them for each container.
_QUOTA_LIMITS = {"cpu": "1", "ephemeral-storage": "1Gi"}


def files(spec: FineTuneJobSpec) -> dict[str, str]:
    """Return the files that the pods read in addition to the recipe, by name."""
    return {contract.OUTPUT_FILE: _RUNNER} if spec.output and spec.output.from_ else {}


def add_upload(draft: Draft, pod: Json, seconds_to_save: int) -> Json:
    """The training pod with the container of the upload, and with the command under `output_runner`.

    A volume of the template that the command's container mounts at `output.from` or above is shared. Without it, `output.from` is an
    emptyDir, which a volume of the template with its name replaces.

    Args:
        seconds_to_save: how long the command, or an upload in progress, may continue after SIGTERM.
    """
    output = draft.spec.output
    if output is None or output.from_ is None:
        return pod
    is_on_volume = any(
        is_below(output.from_, mount) for mount in mounts(pod, names.TRAINER_CONTAINER, but=())
    )
    volumes: list[Json] = [{"name": contract.UPLOAD_VOLUME, "emptyDir": {"sizeLimit": _SIGNALS_LIMIT}}]
    volume_mounts = [_MOUNT]
    if not is_on_volume:
        volumes.append({"name": contract.OUTPUT_VOLUME, "emptyDir": {}})
        volume_mounts.append({"name": contract.OUTPUT_VOLUME, "mountPath": output.from_})
    # NB: on a volume of the user, the modes of files are the user's business.
    mode = output_runner.KEEP if is_on_volume else output_runner.SHARE
    command = next(containers(pod, names.TRAINER_CONTAINER), {}).get("command")
    runner = [*_SCRIPT, output.from_.replace("$", "$$"), mode, str(seconds_to_save)]
    runs_command: Json = {
        "name": names.TRAINER_CONTAINER,
        # NB: a value that is not a list stays as it is, so that the API server rejects it.
        "command": [*runner, *command] if isinstance(command, list) else command,
        "volumeMounts": volume_mounts,
    }
    with_volumes = merge({"spec": {"volumes": volumes}}, pod)
    pod = dict(merge(with_volumes, {"spec": {"containers": [runs_command]}}))
    return dict(merge(pod, {"spec": {"initContainers": [_build_upload(draft, pod)]}}))


def _build_upload(draft: Draft, pod: Json) -> Json:
    """The container of the upload: it has the environment, the volumes and the rights of the command's container."""
    copied_fields = template.init_container_fields(pod, names.TRAINER_CONTAINER, is_product_image=True)
    secret = draft.spec.output.secret_ref if draft.spec.output else None
    own_fields: Json = {
        "name": names.UPLOAD_CONTAINER,
        "image": draft.settings.trainer_image,
        "imagePullPolicy": draft.settings.trainer_pull_policy,
        "command": [contract.UPLOAD_COMMAND],
        "restartPolicy": "Always",
        **({"envFrom": [{"secretRef": secret.to_json()}]} if secret else {}),
    }
    has_resources = any(
        item.get("name") == names.UPLOAD_CONTAINER and item.get("resources")
        for item in items(pod, "initContainers")
    )
    # NB: the resources of the command's container would count twice, since both run at the same time.
    main_resources = copied_fields.pop("resources", {})
    resources = {} if has_resources else {"resources": _build_resources(main_resources)}
    return dict(merge({**copied_fields, **resources}, own_fields))


def _build_resources(main: Json) -> Json:
    """The resources of the container of the upload, given those of the command's container without devices."""
    limits = {"memory": _MEMORY} | {
        name: amount for name, amount in _QUOTA_LIMITS.items() if name in main.get("limits", {})
    }
    requests = {"cpu": _CPU_REQUEST} | {
        name: amount
        for name, amount in _QUOTA_LIMITS.items()
        if name in main.get("requests", {}) and name != "cpu"
    }
    # A request defaults to the limit: pods whose requests are their limits keep their quality of service.
    return {
        "limits": limits,
        "requests": {name: amount for name, amount in requests.items() if name not in limits},
    }
