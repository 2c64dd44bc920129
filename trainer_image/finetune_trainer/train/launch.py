"""Start one worker a rank in this pod with torchrun's machinery, and end as the rank ended that failed first."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds.contract import EXIT_PREEMPTED, PodError, TerminationMessage
from finetune_trainer import outcome
from finetune_trainer.outcome import PodFailure, PreemptedError, TrainingError
from finetune_trainer.train.runtime import scratch
from finetune_trainer.train.runtime.preemption import NOT_STARTED, on_sigterm_at_once
from finetune_trainer.train.runtime.recipe import load_recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from finetune_crds.recipe import Recipe

_WORKER = ("-m", "finetune_trainer.train.worker")


@dataclass(frozen=True)
class Gang:
    """This pod's place in the gang, as torchrun's environment tells it; alone by default."""

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
            processes=int(environment.get("PET_NPROC_PER_NODE", recipe.distributed.processes_per_node)),
            node_rank=int(environment.get("PET_NODE_RANK", "0")),
            address=environment.get("PET_MASTER_ADDR", "localhost"),
            port=int(environment.get("PET_MASTER_PORT") or _free_port()),
        )


def launch() -> TerminationMessage | None:
    """Run the workers to their end; the message of rank 0 where it ran in this pod.

    Raises:
        PodFailure: as the first rank that failed; or the gang did not come together.
    """
    # NB: the first process of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, _stop_before_workers)
    recipe = load_recipe()
    gang = Gang.of(os.environ, recipe)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder, on_sigterm_at_once(_leave_rendezvous):
        os.environ[scratch.ENV_SCRATCH] = folder
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cpus() // gang.processes)))
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        _run_workers(gang, recipe, Path(folder))
        first = scratch.said(Path(folder), 0)
        return first.message if first is not None else None


def _stop_before_workers(_signal: int, _frame: object) -> None:
    """End the launcher; once it has started workers, a handler of torchrun's stands here."""
    raise PreemptedError(NOT_STARTED, None)


def _leave_rendezvous() -> None:
    """End a launcher that waits for other pods, where no handler of Python's runs and nothing is there to lose."""
    if signal.getsignal(signal.SIGTERM) is not _stop_before_workers:
        return
    outcome.tell_kubernetes(*outcome.describe(PreemptedError(NOT_STARTED, None)))
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
        run_id=f"{recipe.job.uid}-{os.environ.get('FINETUNE_ATTEMPT', '1')}",
        role="trainer",
        rdzv_backend="static",
        rdzv_endpoint=f"{gang.address}:{gang.port}",
        rdzv_configs={"rank": gang.node_rank, "timeout": timeout},
        # The operator starts the whole gang again; a rank alone never comes back.
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(config, sys.executable)(*_WORKER)
    except ChildFailedError as error:
        raise first_failure(error.failures, folder) from error
    except SignalException as error:
        raise _stopped(gang, folder, error.sigval) from error
    except DistError as error:
        raise TrainingError(
            "RendezvousTimeout",
            f"the {gang.nodes} pods did not find each other at {gang.address}:{gang.port} in {timeout} s: look "
            "whether all of them are running and may reach that port",
        ) from error


def first_failure(failures: Mapping[int, ProcessFailure], folder: Path) -> PodFailure:
    """The failure that the others followed from: what the rank said, or what ended it.

    Args:
        failures: by global rank, as torchrun saw them.
        folder: where the ranks left their messages.
    """

    def order(rank: int) -> tuple[bool, float]:
        told = scratch.said(folder, rank)
        if told is None:
            return False, failures[rank].timestamp
        return told.message.error is not None and told.message.error.reason == scratch.PEER_LOST, told.when

    rank = min(failures, key=order)
    told = scratch.said(folder, rank)
    if told is not None and told.message.error is not None:
        return _as_said(rank, told.code, told.message.error, told.message.checkpoint_step)
    # NB: torchrun stops the other ranks, so that their exit codes say nothing.
    code = failures[rank].exitcode
    if code >= 0:
        failure = PodFailure(
            "WorkerFailed", f"rank {rank} ended with exit code {code}: see its log", rank=rank
        )
        failure.exit_code = code
        return failure
    name = signal.Signals(-code).name
    hint = ": most likely the container was out of memory" if -code == signal.SIGKILL else ""
    failure = PodFailure("WorkerKilled", f"rank {rank} was ended by {name}{hint}", rank=rank)
    failure.exit_code = 128 - code
    return failure


def _as_said(rank: int, code: int, error: PodError, checkpoint_step: int | None) -> PodFailure:
    failure = PodFailure(error.reason, error.message, rank=rank if error.rank is None else error.rank)
    failure.exit_code, failure.checkpoint_step = code, checkpoint_step
    return failure


def _stopped(gang: Gang, folder: Path, received: signal.Signals) -> PodFailure:
    """What to report after the pod was asked to stop and the workers had their time to save."""
    first_rank = gang.node_rank * gang.processes
    for rank in range(first_rank, first_rank + gang.processes):
        told = scratch.said(folder, rank)
        if told is not None and told.message.error is not None and told.code == EXIT_PREEMPTED:
            return PreemptedError(told.message.error.message, told.message.checkpoint_step)
    if not scratch.is_training(folder):
        return PreemptedError(NOT_STARTED, None)
    failure = PodFailure("Stopped", f"stopped by {received.name} before a checkpoint could be written")
    failure.exit_code = 128 + received
    return failure


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _cpus() -> int:
    """CPUs that this container may use: those it may run on, within its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus
