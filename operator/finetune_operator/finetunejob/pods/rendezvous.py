"""The environment of the pods: torchrun's rendezvous, and the variables that users' scripts read."""

from __future__ import annotations

from finetune_crds import contract, sinks
from finetune_crds.base import Json
from finetune_crds.distributed import Distributed
from finetune_crds.tracking import Tracking
from finetune_operator import names
from finetune_operator.finetunejob.model import FineTuneJob

_NODE_RANK: Json = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.ANNOTATION_INDEX}']"}}


def rendezvous_env(ftj: FineTuneJob, attempt: int, distributed: Distributed) -> list[Json]:
    """The variables with which the ranks of an attempt find each other.

    The first pod of an Indexed Job has the host name <job>-0, and the headless Service is its domain.
    """
    address = f"{names.train_name(ftj.name, attempt)}-0.{names.service_name(ftj.name)}"
    nodes, ranks = distributed.nodes, distributed.ranks_per_node
    # torchrun reads PET_*; the other variables are for users' scripts.
    values = {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": ranks,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": distributed.port,
        "PET_RDZV_CONF": f"timeout={distributed.rendezvous_timeout_seconds}",
        "MASTER_ADDR": address,
        "MASTER_PORT": distributed.port,
        "NUM_NODES": nodes,
        "LOCAL_WORLD_SIZE": ranks,
        "WORLD_SIZE": nodes * ranks,
    }
    interface = distributed.network_interface
    if interface:
        values |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return [
        *({"name": name, "valueFrom": _NODE_RANK} for name in ("PET_NODE_RANK", "NODE_RANK")),
        *({"name": name, "value": str(value)} for name, value in values.items()),
    ]


def run_env(*, servers: tuple[str, str], run_id: str | None) -> list[Json]:
    """The variables that locate the recipe, the MLflow server, its registry and the run."""
    tracking_uri, registry_uri = servers
    values = {
        contract.ENV_RECIPE: contract.RECIPE_PATH,
        "MLFLOW_TRACKING_URI": tracking_uri,
        "MLFLOW_REGISTRY_URI": registry_uri,
        "MLFLOW_RUN_ID": run_id or "",
    }
    return [{"name": name, "value": value} for name, value in values.items() if value]


def command_env(code: str | None = None) -> list[Json]:
    """The variables that locate the parameters of a custom command and, if the operator mounts the command's code, the folder `code`."""
    values = {contract.ENV_PARAMETERS: contract.PARAMETERS_PATH}
    if code:
        values[contract.ENV_CODE] = code
    return [{"name": name, "value": value} for name, value in values.items()]


def sink_env(ftj: FineTuneJob, tracking: Tracking) -> list[Json]:
    """The variables of tracking.sinks: the client of W&B and the Trainer of Hugging Face read them, in a command too."""
    env: list[Json] = []
    for sink in tracking.sinks:
        if sink.uri:
            folder = contract.job_folder(sink.uri, namespace=ftj.namespace, name=ftj.name, uid=ftj.uid)
            if sinks.is_client_folder(folder):
                env.append({"name": sinks.ENV_TENSORBOARD_FOLDER, "value": folder})
            continue
        values = {
            # One run for all attempts, which each of them resumes.
            sinks.ENV_WANDB_RUN_ID: ftj.uid,
            sinks.ENV_WANDB_RESUME: "allow",
            sinks.ENV_WANDB_NAME: tracking.run_name or ftj.name,
            sinks.ENV_WANDB_PROJECT: sink.project,
            sinks.ENV_WANDB_ENTITY: sink.entity,
        }
        env += [{"name": name, "value": value} for name, value in values.items() if value]
        if sink.secret_ref:
            reference = {**sink.secret_ref.to_json(), "key": sinks.ENV_WANDB_API_KEY}
            env.append({"name": sinks.ENV_WANDB_API_KEY, "valueFrom": {"secretKeyRef": reference}})
    return env
