"""The part that kopf runs: watch streams and login.

The handlers contain no logic and store nothing in annotations: an event only triggers a pass over a resource.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import kopf

from finetune_crds.base import GROUP, VERSION, Json
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.finetuneschedule import FineTuneSchedule
from finetune_crds.modelpromotion import ModelPromotion
from finetune_operator import names
from finetune_operator.proxy import find_proxy

_TOKEN_LIFETIME = timedelta(minutes=5)


class _NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no last state of objects: handlers of events do not use what has changed.

    kopf compares every object of an event with its last state. For 100 new jobs with 4 pods, that was 20 of 52 s of CPU (November 2026).
    """

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[kopf.FieldSpec] | None = None
    ) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        del body
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        del body, patch, essence


ResourceHandler = Callable[[str | None, Json], Awaitable[None]]


class Handlers(NamedTuple):
    """The handlers of watch events. They take the type of the event (None for an object of the first list) and the object."""

    finetunejob: ResourceHandler
    modelpromotion: ResourceHandler
    finetuneschedule: ResourceHandler
    child: Callable[[str, str | None, Json], Awaitable[None]]
    """Its first argument is the child's kind: Job, Pod, Service, ConfigMap or NetworkPolicy."""


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what kopf does besides calling the handlers: as little as possible."""
    # The operator does not need kopf's watches of namespaces and CRDs, and writes its own Events.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = 300
    # NB: while a watch starts, kopf holds each object in a task of its own until no event about it has come for `idle_timeout`. With pages
    # of 500 objects and kopf's default of five seconds, all objects were in memory at once, as the API server sent them.
    settings.watching.chunk_size = 100
    settings.queueing.idle_timeout = 0.1
    settings.watching.label_selectors.update(
        dict.fromkeys(("jobs", "pods", "services", "configmaps", "networkpolicies"), names.LABEL_UID)
    )
    # NB: this timeout must be shorter than the pod's grace period. A handler that is stopped loses nothing: the next start lists
    # everything.
    settings.process.ultimate_exiting_timeout = 20
    # kopf sets no finalizer for handlers of events, so no object ever gets this one.
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.persistence.diffbase_storage = _NoDiffBase()


def build_registry(handlers: Handlers, *, has_network_policies: bool) -> kopf.OperatorRegistry:
    """Kopf's registry, with its watch events bound to these handlers.

    Args:
        has_network_policies: whether to watch NetworkPolicies too.
    """
    kopf_registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=kopf_registry)
    async def on_startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)

    @kopf.on.login(registry=kopf_registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo:
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        if info is None:
            raise kopf.LoginError("neither a service account nor a kubeconfig was found")
        # NB: kopf itself ignores the proxy of the environment.
        info = dataclasses.replace(info, proxy_url=info.proxy_url or find_proxy(info.server))
        # NB: kopf reads a rotated token only after a 401 (nolar/kopf#926). With an expiry, kopf reads the token earlier.
        return _with_expiry(info) if info.token else info

    _watch_resource(kopf_registry, FineTuneJob.PLURAL, handlers.finetunejob)
    _watch_resource(kopf_registry, ModelPromotion.PLURAL, handlers.modelpromotion)
    _watch_resource(kopf_registry, FineTuneSchedule.PLURAL, handlers.finetuneschedule)

    @kopf.on.event("batch", "v1", "jobs", labels={names.LABEL_UID: kopf.PRESENT}, registry=kopf_registry)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        await handlers.child("Job", event["type"], _to_json(event))

    @kopf.on.event("", "v1", "pods", labels={names.LABEL_UID: kopf.PRESENT}, registry=kopf_registry)
    async def pod_event(event: kopf.RawEvent, **_: Any) -> None:
        await handlers.child("Pod", event["type"], _to_json(event))

    @kopf.on.event("", "v1", "services", labels={names.LABEL_UID: kopf.PRESENT}, registry=kopf_registry)
    async def service_event(event: kopf.RawEvent, **_: Any) -> None:
        await handlers.child("Service", event["type"], _to_json(event))

    @kopf.on.event("", "v1", "configmaps", labels={names.LABEL_UID: kopf.PRESENT}, registry=kopf_registry)
    async def config_map_event(event: kopf.RawEvent, **_: Any) -> None:
        await handlers.child("ConfigMap", event["type"], _to_json(event))

    if has_network_policies:

        @kopf.on.event(
            "networking.k8s.io",
            "v1",
            "networkpolicies",
            labels={names.LABEL_UID: kopf.PRESENT},
            registry=kopf_registry,
        )
        async def network_policy_event(event: kopf.RawEvent, **_: Any) -> None:
            await handlers.child("NetworkPolicy", event["type"], _to_json(event))

    return kopf_registry


def _watch_resource(kopf_registry: kopf.OperatorRegistry, plural: str, handler: ResourceHandler) -> None:
    @kopf.on.event(GROUP, VERSION, plural, id=plural, registry=kopf_registry)
    async def resource_event(event: kopf.RawEvent, **_: Any) -> None:
        await handler(event["type"], _to_json(event))


def _to_json(event: kopf.RawEvent) -> Json:
    return dict(event["object"])


def _with_expiry(info: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    return dataclasses.replace(info, expiration=datetime.now(UTC) + _TOKEN_LIFETIME)
