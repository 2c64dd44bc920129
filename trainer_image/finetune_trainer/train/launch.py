"""Starts the workers of this pod with torchrun's elastic launcher, and reports the rank that failed first."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds.contract import ENV_ATTEMPT, EXIT_PREEMPTED, PodError, TerminationMessage
from finetune_trainer.pod import exit_status
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.pod.cpus import count_cpus
from finetune_trainer.pod.exit_status import PodFailure, PreemptedError, TrainingError
from finetune_trainer.train.runtime import scratch
from finetune_trainer.train.runtime.preemption import NOT_STARTED, on_sigterm
from finetune_trainer.train.runtime.recipe import load_recipe

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from finetune_crds.recipe import Recipe

_WORKER = ("-m", "finetune_trainer.train.worker")
_CRASH_HINT = ": native code crashed; the log of the pod has the Python stacks of the rank"
# By signal, what usually causes it.
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: ": the container most likely ran out of memory",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL), _CRASH_HINT
    ),
}


@dataclass(frozen=True)
class Gang:
    """The pods of the job, and which of them is this one, from torchrun's environment; by default the only pod.

    nodes: pods in the gang.
    processes: ranks in each pod.
    node_rank: the index of this pod.
    address, port: of the rendezvous, at the first pod.
    """

    nodes: int
    processes: int
    node_rank: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str], recipe: Recipe) -> Gang:
        """Read PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT."""
        return cls(
            nodes=int(environment.get("PET_NNODES", "1")),
            processes=int(environment.get("PET_NPROC_PER_NODE", recipe.distributed.ranks_per_node)),
            node_rank=int(environment.get("PET_NODE_RANK", "0")),
            address=environment.get("PET_MASTER_ADDR", "localhost"),
            port=int(environment.get("PET_MASTER_PORT") or _find_free_port()),
        )


def launch() -> TerminationMessage | None:
    """Run the workers of this pod, and return the message of rank 0 if it ran in this pod.

    A recipe that is started by hand, without the operator's FINETUNE_ATTEMPT, is checked against the rules of FineTuneJob.spec. In pods of
    the operator, the API server has validated it.

    Raises:
        RecipeRefusedError: the recipe is wrong, or the pod does not have the GPUs that it needs.
        PodFailure: the outcome of the first rank that failed, or the rendezvous timed out.
    """
    # NB: PID 1 of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, _stop_before_workers)
    recipe = load_recipe()
    if ENV_ATTEMPT not in os.environ:
        # Nothing has validated this recipe. The import takes half a second, which pods of the operator save.
        from finetune_trainer.pod import spec_rules

        spec_rules.check(recipe)
    gang = Gang.of(os.environ, recipe)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder, on_sigterm(_end_in_rendezvous):
        os.environ[scratch.ENV_SCRATCH] = folder
        set_defaults(os.environ, max(1, count_cpus() // gang.processes))
        _choose_device(recipe, gang, Path(folder))
        _run_workers(gang, recipe, Path(folder))
        outcome = scratch.read_outcome(Path(folder), rank=0)
        return outcome.message if outcome is not None else None


def set_defaults(environment: MutableMapping[str, str], threads: int) -> None:
    """Set environment variables for the libraries of the ranks, unless they are set."""
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    # NCCL reports a link that fails during a collective in its log only, not in an exception.
    environment.setdefault("NCCL_DEBUG", "WARN")
    # Where a rank was when native code crashed, which no exception reports.
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    # The older name of PYTORCH_ALLOC_CONF, which users may have set instead.
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        # Buffers of different sizes come and go: blocks that can grow leave fewer holes between them.
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _choose_device(recipe: Recipe, gang: Gang, folder: Path) -> None:
    """Check that the pod has the GPUs that the recipe needs; hide all GPUs if the recipe asks for CPUs."""
    if recipe.distributed.device == "CPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    # torch takes seconds to import; by now SIGTERM has its handler.
    from finetune_trainer.train.model.memory import model_size
    from finetune_trainer.train.runtime import device

    device.check(
        recipe,
        gang.processes,
        device.Gpus.visible(),
        lambda: model_size.count_parameters(recipe.model, folder / "config"),
    )


def _stop_before_workers(_signal: int, _frame: object) -> None:
    """End the launcher; torchrun installs its own handler when it starts workers."""
    raise PreemptedError(NOT_STARTED, checkpoint_step=None)


def _end_in_rendezvous() -> None:
    """End a launcher that waits for other pods; no work is lost.

    The thread of `on_sigterm` calls this: Python runs no signal handler while the launcher waits.
    """
    # If workers run, torchrun has replaced the handler, and passes the signal on to the workers.
    if signal.getsignal(signal.SIGTERM) is not _stop_before_workers:
        return
    code, message = exit_status.describe(PreemptedError(NOT_STARTED, checkpoint_step=None))
    exit_status.write_termination_message(code, message)
    shutil.rmtree(os.environ[scratch.ENV_SCRATCH], ignore_errors=True)
    os._exit(EXIT_PREEMPTED)


def _run_workers(gang: Gang, recipe: Recipe, folder: Path) -> None:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    timeout = recipe.distributed.rendezvous_timeout_seconds
    config = LaunchConfig(
        min_nodes=gang.nodes,
        max_nodes=gang.nodes,
        nproc_per_node=gang.processes,
        run_id=f"{recipe.job.uid}-{read_attempt()}",
        role="trainer",
        rdzv_backend="static",
        rdzv_endpoint=f"{gang.address}:{gang.port}",
        rdzv_configs={"rank": gang.node_rank, "timeout": timeout},
        # The operator restarts the whole gang, never a single rank.
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(config, sys.executable)(*_WORKER)
    except ChildFailedError as error:
        raise find_first_failure(error.failures, folder) from error
    except SignalException as error:
        raise _build_stopped_failure(gang, folder, error.sigval) from error
    except DistError as error:
        raise TrainingError(
            "RendezvousTimeout",
            f"the {gang.nodes} pods did not all join the rendezvous at {gang.address}:{gang.port} within {timeout} s: check "
            "whether all of them are running and may reach that port",
        ) from error


def find_first_failure(failures: Mapping[int, ProcessFailure], folder: Path) -> PodFailure:
    """Return the failure that caused the others: the outcome that the rank wrote, or its exit code or signal.

    Args:
        failures: torchrun's, by global rank.
        folder: where the ranks wrote their outcomes.
    """

    # By time, but ranks that only lost another rank come last.
    def order(rank: int) -> tuple[bool, float]:
        outcome = scratch.read_outcome(folder, rank)
        if outcome is None:
            return False, failures[rank].timestamp
        is_consequence = (
            outcome.message.error is not None and outcome.message.error.reason == scratch.PEER_LOST
        )
        return is_consequence, outcome.when

    rank = min(failures, key=order)
    outcome = scratch.read_outcome(folder, rank)
    if outcome is not None and outcome.message.error is not None:
        return _build_failure(rank, outcome.code, outcome.message.error, outcome.message.checkpoint_step)
    # NB: only the code of this rank: torchrun stops the other ranks, so their codes mean nothing. A negative code is minus a signal.
    code = failures[rank].exitcode
    if code >= 0:
        failure = PodFailure("WorkerFailed", f"rank {rank} exited with code {code}: see its log", rank=rank)
        failure.exit_code = code
        return failure
    name = signal.Signals(-code).name
    hint = _SIGNAL_HINTS.get(-code, "")
    failure = PodFailure("WorkerKilled", f"rank {rank} was killed by {name}{hint}", rank=rank)
    # As in a shell: 128 + the signal.
    failure.exit_code = 128 - code
    return failure


def _build_failure(rank: int, code: int, error: PodError, checkpoint_step: int | None) -> PodFailure:
    failure = PodFailure(error.reason, error.message, rank=rank if error.rank is None else error.rank)
    failure.exit_code, failure.checkpoint_step = code, checkpoint_step
    return failure


def _build_stopped_failure(gang: Gang, folder: Path, received: signal.Signals) -> PodFailure:
    """Return the outcome of a pod that received SIGTERM, after its workers had time to save.

    It is that of the first rank that was preempted; without one, a preemption if no rank had begun to train, or else a failure.
    """
    first_rank = gang.node_rank * gang.processes
    for rank in range(first_rank, first_rank + gang.processes):
        outcome = scratch.read_outcome(folder, rank)
        if outcome is not None and outcome.message.error is not None and outcome.code == EXIT_PREEMPTED:
            error = outcome.message.error
            return PreemptedError(error.message, outcome.message.checkpoint_step, error.reason)
    if not scratch.is_training(folder):
        return PreemptedError(NOT_STARTED, checkpoint_step=None)
    failure = PodFailure("Stopped", f"stopped by {received.name} before a checkpoint could be written")
    failure.exit_code = 128 + received
    return failure


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
