"""apply: carry out a decision about a promotion. The status is written first and records every other write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from finetune_crds.base import API_VERSION, Json
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator import names
from finetune_operator.controller import status as status_writer
from finetune_operator.controller.events import EventTarget
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.modelpromotion.job_applier import JobApplier
from finetune_operator.modelpromotion.model import (
    ClaimAlias,
    JobAction,
    Promotion,
    PromotionAction,
    PromotionDecision,
)
from finetune_operator.modelpromotion.notices import build_removal_notice, list_new_notices
from finetune_operator.modelpromotion.observe import ModelPromotionObserver
from finetune_operator.notifications.model import Notice
from finetune_operator.registry.base import MoveAlias, RegisteredModel, Registry
from finetune_operator.registry.writer import AliasMoved, AliasWriter, ModelReplaced

log = logging.getLogger(__name__)

KIND = "ModelPromotion"


class FailedAction(NamedTuple):
    """A write that failed."""

    action: PromotionAction
    error: ExternalError


class Applied(NamedTuple):
    """The resource after its status was written (None if the status was unchanged), and the writes that failed."""

    body: Json | None
    failed_actions: tuple[FailedAction, ...]


class StaleError(Exception):
    """The promotion has changed since the decision."""


@dataclass
class ModelPromotionApplier:
    """Writes to the API server, to the registry and to serving endpoints.

    `moved` is called with the name of a model whose alias was moved, and `announce` with each new move in a history and
    with the removal of an alias.
    """

    kube: Kube
    store: Store
    observer: ModelPromotionObserver
    writer: AliasWriter
    moved: Callable[[str], None]
    announce: Callable[[Notice], None]
    child_jobs: JobApplier = field(init=False)

    def __post_init__(self) -> None:
        self.child_jobs = JobApplier(self.kube, self.store, self.observer)

    async def apply(self, promotion: Promotion, decision: PromotionDecision, now: datetime) -> Applied:
        """Carry out a decision: first the Events and the status, then its actions in their order (the alias before the endpoint).

        Raises:
            KubeError: the API server refused something, or could not be reached.
            LeaseBusy: another replica writes to the model.
            StaleError: the promotion changed meanwhile.
            AliasMoved: another client moved the alias meanwhile.
            ModelReplaced: the registry has another model of this name.
        """
        body = await self.write_status(promotion, decision, now)
        resource_version = str(body["metadata"]["resourceVersion"]) if body else promotion.version
        failed_actions: list[FailedAction] = []
        for action in decision.actions:
            try:
                await self._act(promotion, action, resource_version, now)
            except (AliasMoved, ModelReplaced):
                # The decision is outdated, so no further action of it is taken.
                raise
            except ExternalError as error:
                # NB: a rejected write of the alias must not block the endpoint's rollback, nor the other way round.
                failed_actions.append(FailedAction(action, error))
        return Applied(body, tuple(failed_actions))

    async def _act(
        self, promotion: Promotion, action: PromotionAction, resource_version: str, now: datetime
    ) -> None:
        """Move the alias, request a change of the endpoint, or create or stop a Job."""
        # The checks below are for the types: a decision moves an alias only with a spec, and changes an endpoint only with a backend.
        spec, backend = promotion.spec, promotion.backend
        if isinstance(action, JobAction):
            await self.child_jobs.act(promotion, action)
            return

        async def refuse_stale() -> None:
            await self._refuse_stale(promotion, resource_version)

        if not isinstance(action, MoveAlias | ClaimAlias):
            if backend:
                client = await self.observer.open_endpoint(promotion, backend)
                await refuse_stale()
                await asyncio.to_thread(client.act, action)
            return
        if spec is None:
            return
        registry = await self.observer.registry(promotion)

        async def refuse_foreign(model: RegisteredModel) -> None:
            ownership = await self.observer.find_ownership(promotion, spec, registry, model)
            if ownership.state == "Foreign":
                raise StaleError(f"{ownership.owner} moves alias {spec.alias} of {spec.model}")

        try:
            if isinstance(action, ClaimAlias):
                await self._claim(promotion, spec, registry, action)
                return
            await self.writer.move(
                registry, spec.model, spec.alias, action, refuse_stale, check_model=refuse_foreign
            )
        finally:
            # Also after an error, since the write may have taken effect.
            self.observer.models.forget(registry.uri, spec.model)
        log.info("%s: alias %s of %s points at version %s", promotion.key, spec.alias, spec.model, action.to)
        if promotion.deleting and action.to is None:
            self.announce(build_removal_notice(promotion, spec, action.expected, now))
        self.moved(spec.model)

    async def _claim(
        self, promotion: Promotion, spec: ModelPromotionSpec, registry: Registry, action: ClaimAlias
    ) -> None:
        owners = self.observer.owners
        if owners and not await owners.take(
            registry, spec.model, spec.alias, promotion.key, is_new=action.is_new
        ):
            raise StaleError(f"another installation owns alias {spec.alias} of {spec.model}")

    async def _refuse_stale(self, promotion: Promotion, resource_version: str) -> None:
        """Raise unless the promotion is unchanged. NB: a replica that was paused would otherwise carry out an outdated decision."""
        current = await self.kube.get(KIND, promotion.namespace, promotion.name)
        if current is None or current["metadata"]["resourceVersion"] != resource_version:
            raise StaleError(f"{promotion.key} changed meanwhile")

    async def write_status(
        self, promotion: Promotion, decision: PromotionDecision, now: datetime, *, onto: Json | None = None
    ) -> Json | None:
        """Write the status if it changed, and return the resource as written; None if nothing was written.

        Args:
            onto: the resource, if this pass has already written its status. The new status then replaces the written one, even if the
                new one equals the status from before the pass.

        Raises:
            KubeError: the API server refused the write, or could not be reached.
        """
        if decision.status == promotion.status and onto is None:
            return None
        about = EventTarget(KIND, promotion.name, promotion.namespace, promotion.uid)
        resource_version = str(onto["metadata"]["resourceVersion"]) if onto else promotion.version
        written = await status_writer.write_status(
            self.kube,
            self.store,
            about,
            version=resource_version,
            # Also with `onto`: an Event that this pass has already written keeps its name, and is not written twice.
            before=promotion.status,
            after=decision.status,
            now=now,
        )
        for notice in list_new_notices(promotion, decision.status):
            self.announce(notice)
        return written

    async def set_finalizer(self, promotion: Promotion, *, is_needed: bool) -> None:
        """Add the operator's finalizer to a promotion, or remove it.

        Raises:
            KubeError: the API server refused it, or could not be reached.
        """
        await self.kube.apply(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {
                    "name": promotion.name,
                    "namespace": promotion.namespace,
                    "uid": promotion.uid,
                    "finalizers": [names.FINALIZER] if is_needed else [],
                },
            }
        )
