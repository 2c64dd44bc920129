"""apply: carry out a decision. Every step may be repeated; after a crash between two steps, the next pass completes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from finetune_crds.base import API_VERSION, Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.tracking import Tracking
from finetune_operator import names
from finetune_operator.batch.state import is_being_deleted
from finetune_operator.controller import status as status_writer
from finetune_operator.controller.events import EventTarget
from finetune_operator.controller.leases import LeaseBusy
from finetune_operator.controller.projection import COMPANIONS, list_companion_kinds
from finetune_operator.controller.store import CHILDREN, Store
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.background_writes import BackgroundWrites
from finetune_operator.finetunejob.children import is_child
from finetune_operator.finetunejob.decision import (
    Action,
    ActionResult,
    CancelRun,
    DatabricksAction,
    Decision,
    Deletion,
    EnsureRun,
    FinishRun,
    LogMetrics,
    MlflowAction,
    SetAlias,
    SpecChange,
    SubmitRun,
    TagVersion,
)
from finetune_operator.finetunejob.failed_restores import FailedRestores
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.databricks_preparations import PreparationReader
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.finetunejob.observe.preparation_leases import PreparationLeases
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.finetunejob.transitions import count_transitions
from finetune_operator.kube import Kube, KubeError
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import MoveAlias
from finetune_operator.registry.tracked import Tracked
from finetune_operator.registry.writer import ANYWHERE, AliasWriter

log = logging.getLogger(__name__)


# The role in spec.pods, by the component of the Job.
_ROLES = {names.PREP: "prepare", names.TRAIN: "train", names.EVALUATE: "evaluate"}


class NameTaken(Exception):  # noqa: N818
    """A child cannot be created because another object has its name."""


class Applied(NamedTuple):
    """The results of the actions that were carried out, in their order, and the error of the last one if it failed."""

    results: tuple[ActionResult, ...]
    failure: ExternalError | LeaseBusy | None


@dataclass
class FineTuneJobApplier:
    """Writes to the API server, to MLflow and to Databricks.

    Attributes:
        poller: opens the MLflow server and the registry of a job.
        run_creator: creates the MLflow run of a job.
        preparations: writes to the Databricks workspace of a job.
        leases: takes the Leases of preparations.
        writer: moves the aliases of registered models.
        namespaces: reads the uids of namespaces, which are tags of runs.
        writes: writes to MLflow and Databricks outside the passes.
        failed_restores: reports NetworkPolicies of running jobs that cannot be created.
    """

    kube: Kube
    store: Store
    poller: RunPoller
    run_creator: RunCreator
    preparations: PreparationReader
    leases: PreparationLeases
    writer: AliasWriter
    namespaces: NamespaceReader
    writes: BackgroundWrites
    failed_restores: FailedRestores

    @classmethod
    def of(
        cls, observer: FineTuneJobObserver, writer: AliasWriter, namespaces: NamespaceReader
    ) -> FineTuneJobApplier:
        """Return the applier that writes to what an observer reads."""
        return cls(
            observer.kube,
            observer.store,
            observer.poller,
            observer.run_creator,
            observer.preparations,
            observer.leases,
            writer,
            namespaces,
            BackgroundWrites.of(observer.settings, observer.pace),
            FailedRestores(observer.kube),
        )

    async def apply(self, ftj: FineTuneJob, decision: Decision, now: datetime) -> Applied:
        """Carry out a decision: deletions, the Lease, children, MLflow and Databricks, in this order.

        Stops at the first action that fails, or whose server takes long.

        Raises:
            KubeError: the API server refused something, or could not be reached.
            NameTaken: a child's name belongs to another object.
        """
        await self._delete(ftj, decision)
        if decision.lease:
            await self.leases.take(ftj, decision.lease)
        await self._apply_children(ftj, decision, now)
        return await self._carry_out_actions(ftj, decision.actions)

    async def _apply_children(self, ftj: FineTuneJob, decision: Decision, now: datetime) -> None:
        """Create and change children."""
        # The Service, the ConfigMap and the NetworkPolicy are written together, before the Job: if another owner has one of their names, no
        # pod may start.
        companions = [body for body in decision.apply if body["kind"] in COMPANIONS]
        starts_step = len(companions) < len(decision.apply)
        applied = await asyncio.gather(
            *(
                self._apply_companion(ftj, body)
                if starts_step or body["kind"] != "NetworkPolicy"
                else self._restore_network_policy(ftj, body, now)
                for body in companions
            ),
            return_exceptions=True,
        )
        # NB: errors are raised only when all writes have ended: a write that outlasts its pass would interfere with the next pass.
        for error in applied:
            if error is not None:
                raise error
        for body in decision.apply:
            if body["kind"] not in COMPANIONS:
                await self._create_once(ftj, body)
        for body in decision.scaled:
            self._keep("Job", await self.kube.apply(body))
            log.info(
                "scaled Job %s/%s to %d pods",
                ftj.namespace,
                body["metadata"]["name"],
                body["spec"]["parallelism"],
            )
        for change in decision.changed:
            await self._change(ftj, change)

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the results of writes for a job that was deleted."""
        self.writes.forget(ftj)
        self.failed_restores.forget(ftj)

    async def write_status(self, ftj: FineTuneJob, decision: Decision, now: datetime) -> bool:
        """Write an Event for each changed condition and then the status, and return True; return False if the status is unchanged.

        Raises:
            KubeError: the API server refused it, or could not be reached.
        """
        if decision.status == ftj.status:
            return False
        about = EventTarget("FineTuneJob", ftj.name, ftj.namespace, ftj.uid)
        before, after = ftj.status, decision.status
        await status_writer.write_status(
            self.kube, self.store, about, version=ftj.version, before=before, after=after, now=now
        )
        count_transitions(ftj, after, now)
        return True

    async def set_finalizer(self, ftj: FineTuneJob, *, is_needed: bool) -> None:
        """Add the operator's finalizer to a job, or remove it.

        Raises:
            KubeError: the API server refused it, or could not be reached.
        """
        written = await self.kube.apply(
            {
                "apiVersion": API_VERSION,
                "kind": "FineTuneJob",
                "metadata": {
                    "name": ftj.name,
                    "namespace": ftj.namespace,
                    "uid": ftj.uid,
                    "finalizers": [names.RUN_FINALIZER] if is_needed else [],
                },
            }
        )
        # NB: without its last finalizer, a job that is being deleted no longer exists and must not return to the cache.
        if not ftj.deleting:
            self.store.put("FineTuneJob", written)

    async def _delete(self, ftj: FineTuneJob, decision: Decision) -> None:
        if decision.deletes_all:
            for kind in list_companion_kinds(self.poller.settings):
                await self._delete_all(ftj, kind)
            for kind in backends.list_leftover_kinds(ftj):
                await self._delete_leftovers(ftj, kind)
        for item in decision.delete:
            await self._delete_child(ftj, item)

    async def _delete_all(self, ftj: FineTuneJob, kind: str) -> None:
        """Delete all children of a kind."""
        selector = f"{names.LABEL_UID}={ftj.uid}"
        for body in (await self.kube.list(kind, ftj.namespace, labelSelector=selector)).objects:
            meta = body["metadata"]
            if is_child(body, ftj):
                await self.kube.delete(kind, ftj.namespace, meta["name"], meta["uid"])

    async def _delete_leftovers(self, ftj: FineTuneJob, kind: str) -> None:
        try:
            await self._delete_all(ftj, kind)
        except KubeError as error:
            # The custom kind may no longer be installed, or this operator may have lost the permission to delete its objects.
            if error.status not in (403, 404):
                raise
            log.warning("%s: its children of kind %s cannot be deleted: %s", ftj.key, kind, error)

    async def _delete_child(self, ftj: FineTuneJob, item: Deletion) -> None:
        # NB: with foreground deletion, a Job stays until its pods are deleted. Without the Job, the owner of its pods would be unknown. For
        # the exception, see `Deletion.frees_name`.
        foreground = item.kind == "Job" and not item.frees_name
        await self.kube.delete(item.kind, ftj.namespace, item.name, item.uid, foreground=foreground)
        log.info("deleted %s %s/%s", item.kind, ftj.namespace, item.name)

    async def _change(self, ftj: FineTuneJob, change: SpecChange) -> None:
        """Change the spec of a FineTuneJob of the sweep, unless it was deleted meanwhile."""
        kind = "FineTuneJob"
        try:
            await self.kube.set_spec(kind, ftj.namespace, change.name, change.uid, change.fields)
        except KubeError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise
        else:
            log.info("changed %s of %s %s/%s", ", ".join(change.fields), kind, ftj.namespace, change.name)

    async def _create_once(self, ftj: FineTuneJob, body: Json) -> None:
        """Create a Job, a custom object or a FineTuneJob of a sweep, or use the one that an interrupted pass created.

        NB: such an object is created and never updated: a Job's template is immutable, and an update may restart a custom object.
        """
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            created = await self.kube.create_or_get(body)
        except KubeError as error:
            if error.status in (400, 422):
                raise KubeError(error.status, f"{error}: {_remedy(body)}", error.reason) from error
            raise
        if created.is_new:
            log.info("created %s %s/%s", kind, ftj.namespace, name)
        elif not is_child(created.body, ftj) or is_being_deleted(created.body):
            raise NameTaken(_explain_taken_name(body, created.body))
        self._keep(kind, created.body)

    async def _apply_companion(self, ftj: FineTuneJob, body: Json) -> None:
        """Create or update a Service, a ConfigMap or a NetworkPolicy, unless its name belongs to another object."""
        kind, name = body["kind"], body["metadata"]["name"]
        if (kind, name) not in self.store.companions_of((ftj.namespace, ftj.uid)):
            try:
                self._keep(kind, await self.kube.create(body))
            except KubeError as error:
                if error.reason != "AlreadyExists":
                    raise
            else:
                return
        existing = await self.kube.get(kind, ftj.namespace, name)
        if existing is not None and not is_child(existing, ftj):
            raise NameTaken(_explain_taken_name(body, existing))
        self._keep(kind, await self.kube.apply(body))

    async def _restore_network_policy(self, ftj: FineTuneJob, body: Json, now: datetime) -> None:
        """Create the NetworkPolicy of a step whose Job exists, or report why it cannot be created.

        NB: a pass that failed here would no longer follow pods that run, such as those of a job that is older than its NetworkPolicy.
        """
        try:
            await self._apply_companion(ftj, body)
        except NameTaken as error:
            await self.failed_restores.report(ftj, body, ConditionReason.NAME_TAKEN, error, now)
        except KubeError as error:
            await self.failed_restores.report(ftj, body, ConditionReason.POD_REJECTED, error, now)
        else:
            self.failed_restores.forget(ftj)

    def _keep(self, kind: str, body: Json) -> None:
        """Put a child into the cache before the watch delivers it. Custom kinds are not watched.

        NB: not a FineTuneJob of a sweep. Only an event that is news to the cache queues a pass over it, so the watch must deliver it.
        """
        if kind in CHILDREN:
            self.store.put(kind, body)

    async def _carry_out_actions(self, ftj: FineTuneJob, actions: Iterable[Action]) -> Applied:
        """Write to MLflow and Databricks, until an action fails or its server takes long: the next actions may depend on it.

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


def _remedy(body: Json) -> str:
    """Return the remedy for an object that the API server rejects. Users write the pod template of a Job."""
    custom_kind = backends.find_custom_kind(body["kind"])
    if custom_kind:
        return custom_kind.remedy
    if body["kind"] == "FineTuneJob":
        return "create a FineTuneJob with another name and a correction of spec.sweep"
    role = _ROLES.get(body["metadata"]["labels"].get(names.LABEL_COMPONENT), "train")
    return f"correct spec.pods.{role}, and the job continues"


def _explain_taken_name(body: Json, existing: Json) -> str:
    kind, name = body["kind"], body["metadata"]["name"]
    owners = existing["metadata"].get("ownerReferences") or []
    # Only an earlier job of this name has children of this name.
    belongs_to_job = any(owner["kind"] == "FineTuneJob" for owner in owners)
    if is_being_deleted(existing) or belongs_to_job:
        return f"{kind} {name} of an earlier job is still being deleted: waiting until it no longer exists"
    return f"{kind} {name} exists and has another owner: delete this object, or create a FineTuneJob with another name"
