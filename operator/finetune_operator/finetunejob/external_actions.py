"""Carries out the actions of a decision at MLflow, registries and Databricks, outside the passes where a server takes long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from finetune_crds.conditions import ConditionReason
from finetune_crds.tracking import Tracking
from finetune_operator.controller.leases import LeaseBusy
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.background_writes import BackgroundWrites
from finetune_operator.finetunejob.decision import (
    Action,
    ActionResult,
    CancelRun,
    DatabricksAction,
    EnsureRun,
    FinishRun,
    LogMetrics,
    MlflowAction,
    SetAlias,
    SubmitRun,
    TagVersion,
)
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.databricks_preparations import PreparationReader
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import MoveAlias
from finetune_operator.registry.tracked import Tracked
from finetune_operator.registry.writer import ANYWHERE, AliasWriter

log = logging.getLogger(__name__)


class Applied(NamedTuple):
    """The results of the actions that were carried out, in their order, and the error of the last one if it failed."""

    results: tuple[ActionResult, ...]
    failure: ExternalError | LeaseBusy | None


@dataclass
class ExternalActions:
    """Writes to the servers outside the cluster.

    Attributes:
        poller: opens the MLflow server and the registry of a job.
        run_creator: creates the MLflow run of a job.
        preparations: writes to the Databricks workspace of a job.
        writer: moves the aliases of registered models.
        namespaces: reads the uids of namespaces, which are tags of runs.
        writes: writes outside the passes.
    """

    poller: RunPoller
    run_creator: RunCreator
    preparations: PreparationReader
    writer: AliasWriter
    namespaces: NamespaceReader
    writes: BackgroundWrites

    @classmethod
    def of(
        cls, observer: FineTuneJobObserver, writer: AliasWriter, namespaces: NamespaceReader
    ) -> ExternalActions:
        """Return the actions at the servers that an observer reads."""
        writes = BackgroundWrites.of(observer.settings, observer.pace)
        return cls(observer.poller, observer.run_creator, observer.preparations, writer, namespaces, writes)

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the results of writes for a job that was deleted."""
        self.writes.forget(ftj)

    async def carry_out(self, ftj: FineTuneJob, actions: Iterable[Action]) -> Applied:
        """Carry out actions in their order, until one fails or its server takes long: the next actions may depend on it.

        The pass that follows the end of a write requests them again.
        """
        results: list[ActionResult] = []
        for action in actions:
            try:
                result = await self._act(ftj, action)
            except ExternalError as error:
                return Applied((*results, ActionResult(action, problem=error.problem)), error)
            except LeaseBusy as error:
                delayed = Problem(ConditionReason.MOVE_DELAYED, f"{error}: retrying")
                return Applied((*results, ActionResult(action, problem=delayed)), error)
            results.append(result)
            if result.pending_seconds is not None:
                break
        return Applied(tuple(results), None)

    async def _act(self, ftj: FineTuneJob, action: Action) -> ActionResult:
        """Write to MLflow or Databricks, and return the result, which is pending if the server takes long.

        Raises:
            ExternalError: the write failed.
            LeaseBusy: another replica writes to the registered model.
        """
        if isinstance(action, DatabricksAction):
            server = self.preparations.find_server(ftj)
            act = partial(self._write_to_databricks, ftj, action)
        else:
            server = self.poller.settings.servers(ftj.spec.tracking if ftj.spec else Tracking())
            act = partial(self._write_to_mlflow, ftj, action)
        return await self.writes.carry_out(ftj, server, action, act)

    async def _write_to_databricks(self, ftj: FineTuneJob, action: DatabricksAction) -> ActionResult:
        """Carry out an action in the Databricks workspace of the job's preparation."""
        match action:
            case SubmitRun():
                run_id: str | None = await self.preparations.submit(ftj, action)
            case CancelRun():
                run_id = await self.preparations.cancel(ftj, action)
        return ActionResult(action, databricks_run_id=run_id)

    async def _write_to_mlflow(self, ftj: FineTuneJob, action: EnsureRun | MlflowAction) -> ActionResult:
        """Carry out an action at the job's MLflow server or registry, and discard what the poller has read meanwhile.

        NB: also after an error: even a failed write may have changed it.
        """
        try:
            if isinstance(action, EnsureRun):
                tags = {**action.tags, **await self.namespaces.build_tags(ftj.namespace)}
                return await self.run_creator.create(ftj, replace(action, tags=tags))
            tracked = await self.poller.tracked(ftj)
            # Without a server, there is nothing to write.
            if tracked is not None:
                await self._change_mlflow(ftj, tracked, action)
            return ActionResult(action)
        finally:
            self.poller.forget(ftj)

    async def _change_mlflow(self, ftj: FineTuneJob, tracked: Tracked, action: MlflowAction) -> None:
        server = tracked.server
        match action:
            case FinishRun():
                await self.poller.ask(ftj, tracked, server.uri, partial(_finish_run, server, ftj, action))
            case LogMetrics():
                await self.poller.ask(ftj, tracked, server.uri, partial(_log_metrics, server, ftj, action))
            case TagVersion():
                await self.poller.ask(
                    ftj, tracked, server.registry_uri, partial(_tag_version, tracked, action)
                )
            case SetAlias():
                await self._set_alias(tracked, action)

    async def _set_alias(self, tracked: Tracked, action: SetAlias) -> None:
        move = MoveAlias(expected=ANYWHERE, to=action.version)
        try:
            registry = await asyncio.to_thread(tracked.registry)
            await self.writer.move(registry, action.model, action.alias, move)
        except ExternalError as error:
            tracked.refused(error)
            raise


def _finish_run(server: Server, ftj: FineTuneJob, action: FinishRun) -> None:
    server.finish_run(action.run_id, action.status)
    log.info("closed MLflow run %s of %s as %s", action.run_id, ftj.key, action.status)


def _log_metrics(server: Server, ftj: FineTuneJob, action: LogMetrics) -> None:
    server.log_metrics(action.run_id, action.metrics, action.step)
    log.info("logged %d metrics to MLflow run %s of %s", len(action.metrics), action.run_id, ftj.key)


def _tag_version(tracked: Tracked, action: TagVersion) -> None:
    tracked.registry().set_tags(action.model, action.version, action.tags)
    log.info("set %d tags of version %s of %s", len(action.tags), action.version, action.model)
