"""The init containers of a custom command: one fetches the commit of `trainer.code.git`, one installs `trainer.dependencies`.

The first uses the product's trainer image, so the user's image does not require git. The second uses the user's image, for its Python
and its packages. Both share the environment, the volumes and the rights of the container `trainer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.code import Code
from finetune_crds.conditions import ConditionReason
from finetune_crds.status import LastFailure
from finetune_crds.trainer import Trainer
from finetune_operator import names
from finetune_operator.batch.state import describe_pods
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import installer, pod_state, template
from finetune_operator.finetunejob.pods.secret_env import build_variable
from finetune_operator.template_merge import containers, merge

# Read once: a decision reads no files.
_INSTALLER = inspect.getsource(installer)
_SCRIPT = ["python3", f"{contract.RECIPE_DIRECTORY}/{contract.DEPENDENCIES_FILE}"]
# torch with its CUDA libraries takes 8 GiB.
_DEPENDENCIES_LIMIT = "50Gi"
CHECKOUT_LIMIT = "10Gi"
"""The most that a commit may take: GitHub asks to keep repositories below 5 GB, and a checkout has the packed and the unpacked files."""
# What each init container of the operator does, as a part of a sentence.
_STEPS = {
    names.CHECKOUT_CONTAINER: "fetches the code",
    names.DEPENDENCIES_CONTAINER: "installs the packages of trainer.dependencies",
}
# The reason of the job's condition if the init container fails.
_REASONS = {
    names.CHECKOUT_CONTAINER: ConditionReason.CHECKOUT_FAILED,
    names.DEPENDENCIES_CONTAINER: ConditionReason.DEPENDENCIES_FAILED,
}


def mistakes(trainer: Trainer) -> Iterator[str]:
    """Yield the mistakes that the schema cannot detect, in requirements and in the address of the code."""
    if trainer.code and trainer.code.git and not _is_address(trainer.code.git.url):
        yield f"spec.trainer.code.git.url {trainer.code.git.url} is not a valid address"
    for text in trainer.dependencies:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            why = str(error).splitlines()[0]
            yield f"spec.trainer.dependencies has {text!r}, which is not a valid requirement ({why})"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        # NB: both the encoding and the property `port` raise ValueError for an invalid address.
        return bool(host.encode("idna")) and parts.port != 0
    except ValueError:
        return False


def files(trainer: Trainer) -> dict[str, str]:
    """Return the files that the pods read in addition to the recipe, by name."""
    return {contract.DEPENDENCIES_FILE: _INSTALLER} if trainer.dependencies else {}


def add_init_containers(draft: Draft, pod: Json) -> Json:
    """The training pod with the code of `trainer.code.git` and the packages of `trainer.dependencies`."""
    trainer = draft.spec.trainer
    if trainer.code and trainer.code.git:
        pod = _add_init_container(pod, _build_checkout(draft, trainer.code, pod))
    return _add_dependencies(pod, trainer.dependencies) if trainer.dependencies else pod


def describe_step(alive: Sequence[Json]) -> str:
    """Describe the running init container of the operator, as the end of a sentence; empty if none runs."""
    for pod in alive:
        for item in pod.get("status", {}).get("initContainerStatuses") or []:
            if item["name"] in _STEPS and "running" in item.get("state", {}):
                return f"; {describe_pods([pod])} {_STEPS[item['name']]}"
    return ""


def list_steps(trainer: Trainer) -> list[str]:
    """The names of the init containers of a training pod that need a server of code or packages."""
    has_code = trainer.code is not None and trainer.code.git is not None
    steps = {names.CHECKOUT_CONTAINER: has_code, names.DEPENDENCIES_CONTAINER: bool(trainer.dependencies)}
    return [name for name, is_needed in steps.items() if is_needed]


def find_failed_step(
    failure: LastFailure, ends: Sequence[pod_state.Exit], trainer: Trainer
) -> ConditionReason | None:
    """The reason to report if an init container of the operator failed; None if the attempt failed for another cause.

    Whether another attempt can succeed follows from the exit code, which the caller reads: see the constants of `installer`.

    Args:
        ends: how the pods of the attempt ended.
    """
    # NB: the name of the container decides, not the reason in its message: a killed container leaves no message, and a command, or
    # an init container of the pod template, may report the same reason.
    container = next((item.container for item in ends if item.pod == failure.pod), None)
    return _REASONS[container] if container in list_steps(trainer) else None


def _add_init_container(pod: Json, container: Json) -> Json:
    return dict(merge(pod, {"spec": {"initContainers": [container]}}))


def _build_checkout(draft: Draft, code: Code, pod: Json) -> Json:
    """The init container that fetches the commit into the folder of the code."""
    git, resolved = code.git, draft.status.code
    commit = resolved.commit if resolved else ""
    reference = git.secret_ref if git else None
    login = []
    if reference:
        login = [
            build_variable(contract.ENV_GIT_USERNAME, reference.name, "username", optional=True),
            build_variable(
                contract.ENV_GIT_PASSWORD, reference.name, "password", optional=reference.optional
            ),
        ]
    copied_fields = template.init_container_fields(pod, names.TRAINER_CONTAINER, is_product_image=True)
    init_container: Json = {
        "name": names.CHECKOUT_CONTAINER,
        "image": draft.settings.trainer_image,
        "imagePullPolicy": draft.settings.trainer_pull_policy,
        "command": [contract.CHECKOUT_COMMAND],
        "args": [_escape(item) for item in (git.url if git else "", commit, code.mount_path)],
        "env": login,
    }
    return dict(merge(copied_fields, init_container))


def _add_dependencies(pod: Json, requirements: Sequence[str]) -> Json:
    """Add an init container that installs the packages, and start the command so that it finds them.

    A volume with the same name in the pod template replaces the emptyDir.
    """
    mount = {"name": contract.DEPENDENCIES_VOLUME, "mountPath": contract.DEPENDENCIES_PATH}
    trainer = next(containers(pod, names.TRAINER_CONTAINER), {})
    install: Json = {
        "name": names.DEPENDENCIES_CONTAINER,
        "image": trainer.get("image"),
        "command": [*_SCRIPT, installer.INSTALL],
        "args": [*requirements],
        "volumeMounts": [mount],
    }
    copied_fields = template.init_container_fields(pod, names.TRAINER_CONTAINER, is_product_image=False)
    command = trainer.get("command")
    additions: Json = {
        "initContainers": [dict(merge(copied_fields, install))],
        "containers": [
            {
                "name": names.TRAINER_CONTAINER,
                # NB: a value that is not a list stays as it is, so that the API server rejects it.
                "command": [*_SCRIPT, installer.RUN, *command] if isinstance(command, list) else command,
                "volumeMounts": [{**mount, "readOnly": True}],
            }
        ],
    }
    scratch = {"name": contract.DEPENDENCIES_VOLUME, "emptyDir": {"sizeLimit": _DEPENDENCIES_LIMIT}}
    volume: Json = {"spec": {"volumes": [scratch]}}
    return dict(merge(merge(volume, pod), {"spec": additions}))


def _escape(argument: str) -> str:
    """Escape an argument, so that Kubernetes expands no variables in it."""
    return argument.replace("$", "$$")
