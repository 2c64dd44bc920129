"""kopf's part: watch streams that fill the store and put keys on the queue, login and health.

There is no logic in the handlers and nothing is remembered in annotations: an event says only that a resource
is to be looked at.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from finetune_crds.base import GROUP, VERSION
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_operator import names
from finetune_operator.model import Json
from finetune_operator.store import Store
from finetune_operator.workqueue import Queues

_TOKEN_LIFETIME = timedelta(minutes=5)
# A key that waits longer than this, or a resync that is this much late, means that the loop is stuck.
_STUCK_SECONDS = 300.0


@dataclass
class Health:
    """When the operator last did what it must keep doing; the liveness probe fails when that is long ago."""

    queues: Queues
    resync_seconds: float
    last_resync: float = field(default_factory=time.monotonic)

    def complaint(self) -> str | None:
        """What is wrong, or None."""
        if self.queues.oldest_age() > _STUCK_SECONDS:
            return f"a resource has waited {self.queues.oldest_age():.0f} s for a worker"
        silent = time.monotonic() - self.last_resync
        return (
            f"the last resync was {silent:.0f} s ago"
            if silent > self.resync_seconds + _STUCK_SECONDS
            else None
        )


def registry(  # noqa: C901
    store: Store, queues: Queues, health: Health, on_gone: Callable[[Json], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """The handlers, bound to this operator's store and queues.

    Args:
        on_gone: called with the last state of a FineTuneJob that was deleted.
    """
    found = kopf.OperatorRegistry()

    @kopf.on.startup(registry=found)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.networking.request_timeout = 30
        settings.watching.server_timeout = 300
        settings.watching.chunk_size = 500
        settings.watching.label_selectors["jobs"] = names.LABEL_UID
        settings.watching.label_selectors["pods"] = names.LABEL_UID
        # NB: must be below the pod's grace period; nothing is lost, the next start looks at everything.
        settings.process.ultimate_exiting_timeout = 20
        settings.persistence.finalizer = f"{GROUP}/unused"

    @kopf.on.login(registry=found)
    def login(**kwargs: Any) -> kopf.ConnectionInfo:
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        if info is None:
            raise kopf.LoginError("neither a service account nor a kubeconfig was found")
        # NB: kopf reads a rotated token only after a 401 (nolar/kopf#926): have it read before that.
        return _expiring(info) if info.token else info

    @kopf.on.event(GROUP, VERSION, FineTuneJob.PLURAL, registry=found)
    async def job_event(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        meta = body["metadata"]
        queues.jobs.add(f"{meta['namespace']}/{meta['name']}")
        if event["type"] == "DELETED":
            store.drop("FineTuneJob", _plain(event))
            await on_gone(_plain(event))
        else:
            store.put("FineTuneJob", _plain(event))
        for key in promotions_of_job(store, meta["namespace"], meta["name"]):
            queues.promotions.add(key)

    @kopf.on.event(GROUP, VERSION, ModelPromotion.PLURAL, registry=found)
    async def promotion_event(event: kopf.RawEvent, **_: Any) -> None:
        note_promotion(store, queues, event["type"], _plain(event))

    async def child_event(kind: str, event: kopf.RawEvent) -> None:
        body = _plain(event)
        if event["type"] == "DELETED":
            store.drop(kind, body)
        else:
            store.put(kind, body)
        meta = body["metadata"]
        queues.jobs.add(f"{meta['namespace']}/{meta['labels'].get(names.LABEL_JOB)}")

    @kopf.on.event("batch", "v1", "jobs", labels={names.LABEL_UID: kopf.PRESENT}, registry=found)
    async def child_job_event(event: kopf.RawEvent, **_: Any) -> None:
        await child_event("Job", event)

    @kopf.on.event("", "v1", "pods", labels={names.LABEL_UID: kopf.PRESENT}, registry=found)
    async def pod_event(event: kopf.RawEvent, **_: Any) -> None:
        await child_event("Pod", event)

    @kopf.on.probe(id="loop", registry=found)
    async def loop_probe(**_: Any) -> str:
        complaint = health.complaint()
        if complaint:
            # NB: any other exception would leave the probe's request hanging.
            raise kopf.PermanentError(complaint)
        return "ok"

    return found


def note_promotion(store: Store, queues: Queues, kind: str | None, body: Json) -> None:
    """What a watch says of a ModelPromotion: into the store, and onto the queue where there is something to do.

    NB: a status alone is no news. The operator writes it, and says itself when to look again; a pass for each of its
    own writes would never wait after a failure whose message is another one each time.
    """
    meta = body["metadata"]
    key = f"{meta['namespace']}/{meta['name']}"
    if kind == "DELETED":
        store.drop("ModelPromotion", body)
        # An alias that it kept may be another's now.
        for other in promotions_of_model(store, body["spec"].get("model")):
            queues.promotions.add(other)
        queues.promotions.add(key)
        return
    held = store.promotions.get((meta["namespace"], meta["name"]))
    store.put("ModelPromotion", body)
    if held is None or _asked(held) != _asked(body):
        queues.promotions.add(key)


def promotions_of_job(store: Store, namespace: str, job: str) -> list[str]:
    """The promotions that take their version from a FineTuneJob."""
    return [
        "/".join(key)
        for key, body in store.promotions.items()
        if key[0] == namespace and body["spec"].get("source", {}).get("fineTuneJob") == job
    ]


def promotions_of_model(store: Store, model: str | None) -> list[str]:
    """The promotions of a registered model."""
    return ["/".join(key) for key, body in store.promotions.items() if body["spec"].get("model") == model]


def _asked(body: Json) -> tuple[Json, object]:
    """All of a promotion but its status: its metadata, but for what every write changes, and its spec."""
    meta = {name: value for name, value in body["metadata"].items() if name not in _EVERY_WRITE}
    return meta, body.get("spec")


_EVERY_WRITE = ("resourceVersion", "managedFields")


def _plain(event: kopf.RawEvent) -> Json:
    return dict(event["object"])


def _expiring(info: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    return dataclasses.replace(info, expiration=datetime.now(UTC) + _TOKEN_LIFETIME)
