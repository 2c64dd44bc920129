"""Reads and writes the Databricks run of a FineTuneJob's preparation.

The run is read in the background, once per poll interval, and not while the workspace is unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_operator import secrets
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.decision import CancelRun, SubmitRun
from finetune_operator.finetunejob.model import FineTuneJob, Preparation
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.preparation import databricks, databricks_submission
from finetune_operator.kube import Kube
from finetune_operator.registry.outages import Outages
from finetune_operator.settings import Settings

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

# The field that messages about the Secret mention.
_LOGIN_FIELD = "spec.data.prepare.spark.databricks.secretRef"


@dataclass
class PreparationReader:
    """Follows the Databricks runs of preparations, in threads outside the event loop.

    Attributes:
        pace: pace of the background reads.
    """

    kube: Kube
    settings: Settings
    pace: ReadPace

    def __post_init__(self) -> None:
        self._outages = Outages(self.pace.clock, self.settings.poll_seconds)
        self._reads = BackgroundReads[Preparation](self.pace, MaxAge.of_polled(self.settings))

    async def read(self, ftj: FineTuneJob) -> Preparation | None:
        """The run as last read; None if there is no run to follow, or no answer yet.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        run_id = databricks.find_run_to_follow(ftj)
        if run_id is None:
            self.forget(ftj)
            return None
        return await self._reads.read(ftj, self.find_server(ftj), run_id, partial(self._read, ftj, run_id))

    def find_server(self, ftj: FineTuneJob) -> Hashable:
        """What identifies the workspace of a job here: the namespace and the name of its Secret, since only the Secret names the workspace."""
        reference = databricks_submission.find_login(ftj, self.settings)
        return ftj.namespace, reference.name if reference else ""

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer, if the run was written to, there is no run to follow, or the job was deleted."""
        self._reads.forget(ftj)

    async def submit(self, ftj: FineTuneJob, action: SubmitRun) -> str:
        """Submit a run, and return its id.

        Raises:
            ExternalError: the workspace refuses, or cannot be reached.
            KubeError: the Secret with the credentials could not be read.
        """
        self.forget(ftj)
        client = await self._open_workspace(ftj)
        return await asyncio.to_thread(_submit, client, action, Path(self.settings.prep_wheels))

    async def cancel(self, ftj: FineTuneJob, action: CancelRun) -> str | None:
        """Cancel a run, and return its id; None if there is no run to cancel.

        Raises:
            ExternalError: the workspace refuses, or cannot be reached.
            KubeError: the Secret with the credentials could not be read.
        """
        self.forget(ftj)
        client = await self._open_workspace(ftj)
        return await asyncio.to_thread(_cancel, client, action)

    async def _read(self, ftj: FineTuneJob, run_id: str) -> Preparation:
        try:
            client = await self._open_workspace(ftj)
            read = partial(_read_run, client, run_id, databricks_submission.find_folder(ftj))
            return await self._outages.ask(client.config.host, read)
        except ExternalError as error:
            return Preparation(problem=error.problem)

    async def _open_workspace(self, ftj: FineTuneJob) -> WorkspaceClient:
        reference = databricks_submission.find_login(ftj, self.settings)
        secret = await secrets.read(self.kube, ftj.namespace, reference, _LOGIN_FIELD)
        # NB: the SDK takes a second to import, and most installations have no Databricks.
        from finetune_operator.databricks.workspace import open_workspace

        return await self._outages.log_in(
            secrets.build_key(secret), partial(open_workspace, secret, self.settings)
        )


def _read_run(client: WorkspaceClient, run_id: str, folder: str) -> Preparation:
    from finetune_operator.databricks import runs

    return Preparation(run=runs.read(client, run_id, folder))


def _submit(client: WorkspaceClient, action: SubmitRun, wheels: Path) -> str:
    from finetune_operator.databricks import runs

    return runs.submit(client, action.submission, wheels)


def _cancel(client: WorkspaceClient, action: CancelRun) -> str | None:
    from finetune_operator.databricks import runs

    run_id = action.run_id or runs.find(client, action.name)
    if run_id:
        runs.cancel(client, run_id)
    return run_id
