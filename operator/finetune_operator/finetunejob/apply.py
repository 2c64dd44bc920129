"""apply: carry out a decision. Every step may be repeated; after a crash between two steps, the next pass completes them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus

from finetune_crds.base import API_VERSION, Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.batch.state import is_being_deleted
from finetune_operator.controller import status as status_writer
from finetune_operator.controller.events import EventTarget
from finetune_operator.controller.projection import COMPANIONS, list_companion_kinds
from finetune_operator.controller.store import CHILDREN, Store
from finetune_operator.finetunejob.children import is_child
from finetune_operator.finetunejob.decision import Decision, Deletion, SpecChange
from finetune_operator.finetunejob.external_actions import Applied, ExternalActions
from finetune_operator.finetunejob.failed_restores import FailedRestores
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.finetunejob.observe.preparation_leases import PreparationLeases
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.finetunejob.transitions import count_transitions
from finetune_operator.kube import Kube, KubeError
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)


# The role in spec.pods, by the component of the Job.
_ROLES = {names.PREP: "prepare", names.TRAIN: "train", names.EVALUATE: "evaluate"}


class NameTaken(Exception):  # noqa: N818
    """A child cannot be created because another object has its name."""


@dataclass
class FineTuneJobApplier:
    """Writes to the API server, to MLflow and to Databricks.

    Attributes:
        leases: takes the Leases of preparations.
        actions: writes to MLflow and to Databricks.
        failed_restores: reports NetworkPolicies of running jobs that cannot be created.
    """

    kube: Kube
    store: Store
    settings: Settings
    leases: PreparationLeases
    actions: ExternalActions
    failed_restores: FailedRestores

    @classmethod
    def of(
        cls, observer: FineTuneJobObserver, writer: AliasWriter, namespaces: NamespaceReader
    ) -> FineTuneJobApplier:
        """Return the applier that writes to what an observer reads."""
        return cls(
            observer.kube,
            observer.store,
            observer.settings,
            observer.leases,
            ExternalActions.of(observer, writer, namespaces),
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
        return await self.actions.carry_out(ftj, decision.actions)

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
        self.actions.forget(ftj)
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
            for kind in list_companion_kinds(self.settings):
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
