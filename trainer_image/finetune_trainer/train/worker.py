"""What each rank runs: `python -m finetune_trainer.train.worker`, started by `launch`."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from finetune_crds.contract import TerminationMessage
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.sinks.feed import Sinks
from finetune_trainer.train.delivery import upload
from finetune_trainer.train.run import Run
from finetune_trainer.train.runtime import scratch, system
from finetune_trainer.train.runtime.distributed import World, join_ranks
from finetune_trainer.train.runtime.explain import explain_error
from finetune_trainer.train.runtime.preemption import Preemption, on_sigterm
from finetune_trainer.train.runtime.recipe import load_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.recipe import Recipe


def main() -> int:
    """Train as one rank, and write the outcome for the launcher."""
    library_variables.set_defaults()
    quiet_libraries()
    rank = int(os.environ["RANK"])
    code = exit_status.run(
        work, report=lambda code, message: scratch.write_outcome(scratch.path(), rank, code, message)
    )
    if dist.is_initialized():
        # NB: after an error on GPUs, `join_ranks` does not destroy its process groups, and a normal exit would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def quiet_libraries() -> None:
    """Silence warnings that users cannot act on, and keep libraries from downloading code during training."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft reads a property that transformers deprecates.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    # peft's warning is wrong for experts: peft applies the LoRA rank and alpha of experts by the names of parameters, but its check of
    # unused patterns compares only the names of layers.
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
    # NB: a library that can import `kernels` downloads compiled kernels from the Hub in the middle of a run. None in
    # sys.modules makes the import fail.
    sys.modules["kernels"] = None  # type: ignore[assignment]


def work() -> TerminationMessage | None:
    """Join the ranks and train; only rank 0 returns a result."""
    preemption = Preemption()
    started = time.monotonic()
    recipe = load_recipe()
    upload.configure_client(recipe.register_.upload if recipe.register_ else None)
    if recipe.training.compile:
        library_variables.set_compiler_defaults(int(os.environ["LOCAL_RANK"]))
    with ExitStack() as stack:
        with on_sigterm(lambda: end_in_rendezvous(preemption)):
            # SIGTERM may have arrived before `on_sigterm` could see it.
            if preemption.requested:
                raise preemption.error()
            timeout = recipe.distributed.collective_timeout_seconds
            world = stack.enter_context(join_ranks(timeout_seconds=timeout, preemption=preemption))
        tracker = Tracker(os.environ.get("MLFLOW_RUN_ID") if world.leads else None)
        sinks = Sinks.of(recipe, f"attempt-{read_attempt()}") if world.leads else Sinks()
        try:
            with tracker, sinks, log_system_metrics(recipe, world, tracker):
                return Run(recipe, world, tracker, sinks, preemption, started).train()
        except BaseException as error:
            reported_error = explain_error(error, world.rank)
            if reported_error is error:
                raise
            # `exit_status.run` prints no traceback of an error that has a message of its own.
            traceback.print_exc()
            raise reported_error from error


@contextmanager
def log_system_metrics(recipe: Recipe, world: World, tracker: Tracker) -> Iterator[None]:
    """While inside, log the CPU, memory and GPU use of every rank, if the recipe enables it."""
    if not recipe.tracking.system_metrics:
        yield
        return
    with ExitStack() as stack:
        run_id = os.environ.get("MLFLOW_RUN_ID")
        rank_tracker = tracker if world.leads else stack.enter_context(Tracker(run_id, quiet=True))
        stack.enter_context(system.log_system_metrics(rank_tracker, world.rank, world.device))
        yield


def end_in_rendezvous(preemption: Preemption) -> None:
    """End a rank that waits for the others to join. Nothing can be lost: the training has not begun.

    `on_sigterm` calls this in a thread of its own: the main thread is blocked in native code, where an exception cannot reach it.
    """
    code, message = exit_status.describe(preemption.error())
    scratch.write_outcome(scratch.path(), int(os.environ["RANK"]), code, message)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
