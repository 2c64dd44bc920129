"""W&B: one run for all pods of a job, resumed by its id."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError

from finetune_trainer.sinks.entries import End, Metrics, Parameters

if TYPE_CHECKING:
    from finetune_trainer.sinks.entries import Entry, Settings

# W&B's client keeps what it logs in a file until the process ends, or for good in offline mode.
MAX_LOGGED_BYTES = 256 * 2**20
_BYTES_PER_VALUE = 64
# Unless the environment of the pod says otherwise: silence in the pod's log, where this module reports errors; no reports of errors to
# the authors of W&B; and seconds until an unreachable server is an error.
_ENVIRONMENT = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_INIT_TIMEOUT": "30"}
# What the client says if the server refuses the key or its user. NB: it raises the CommError of a server that does not answer.
_REFUSED = re.compile(r"returned error 40[13]\b|permission denied", re.IGNORECASE)


class WandbRun:
    """Writes to the W&B run of a job.

    The training step is W&B's own step. So W&B drops the steps that a resumed attempt repeats.
    """

    def __init__(self, settings: Settings) -> None:
        self.label = f"W&B's project {settings.target}"
        self._settings = settings
        self._run: wandb.Run | None = None
        self._logged_bytes = 0
        self._exit_code = 1
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def add(self, entry: Entry) -> None:
        """Log an entry; the client sends it in the background."""
        run = self._run = self._run or self._init()
        if isinstance(entry, Parameters):
            # W&B's method has no types.
            run.config.update(entry.values, allow_val_change=True)  # type: ignore[no-untyped-call]
        elif isinstance(entry, Metrics):
            self._log(run, entry)
        elif isinstance(entry, End):
            self._exit_code = entry.exit_code

    def publish(self) -> None:
        """Do nothing: the client sends entries by itself."""

    def close(self) -> None:
        """Send the rest, and end the run. The run of a job whose attempt failed is resumed by the next attempt."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            # NB: the client's own process writes the last part of its file after `finish`, and would end with this process.
            wandb.teardown()

    def is_final(self, error: Exception) -> bool:
        """Whether a retry cannot succeed."""
        is_refused = isinstance(error, CommError) and _REFUSED.search(str(error)) is not None
        return is_refused or isinstance(error, AuthenticationError | UsageError)

    def _init(self) -> wandb.Run:
        settings = self._settings
        return wandb.init(
            project=settings.target,
            entity=settings.entity,
            id=settings.run_id,
            name=settings.run_name,
            resume="allow",
            # By default, the client writes to the working directory, which can be read-only.
            dir=os.environ.get("WANDB_DIR") or tempfile.gettempdir(),
            settings=wandb.Settings(
                # Only metrics and parameters leave the pod: no output, code, commits or names of packages.
                console="off",
                save_code=False,
                disable_git=True,
                x_save_requirements=False,
                x_disable_machine_info=not settings.has_system_metrics,
                x_disable_stats=not settings.has_system_metrics,
            ),
        )

    def _log(self, run: wandb.Run, entry: Metrics) -> None:
        if entry.is_result or entry.step < run.step:
            # W&B's history only grows. A result belongs to the run as a whole, and repeated steps are in the history already.
            run.summary.update(entry.values)
            return
        if self._logged_bytes >= MAX_LOGGED_BYTES:
            return
        self._logged_bytes += _BYTES_PER_VALUE * len(entry.values)
        if self._logged_bytes >= MAX_LOGGED_BYTES:
            print(
                f"{self.label} gets no more metrics, after {MAX_LOGGED_BYTES // 2**20} MiB from this pod: raise training.logEverySteps",
                flush=True,
            )
        run.log({**entry.values, "_timestamp": entry.time}, step=entry.step)
