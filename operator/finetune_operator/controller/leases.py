"""Leases (coordination.k8s.io): only the replica of the operator that holds a Lease writes what the Lease protects.

The clocks of replicas differ, so a replica does not rely on the timestamps of another: it considers a Lease expired after it
has seen no renewal for the Lease's duration on its own clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

ANNOTATION_ABOUT = "finetune.dev/about"  # for people: what the Lease is held for


class LeaseBusy(Exception):  # noqa: N818
    """Another replica holds the Lease, or just released it: retry in about a second."""


class HeldLease(NamedTuple):
    """A Lease that this process holds, and when it expires on this process's clock."""

    body: Json
    until: float


@dataclass
class Leases:
    """Acquires, renews and releases Leases in one namespace.

    Attributes:
        identity: unique name of this process.
        seconds: duration of a Lease that is not renewed.
        clock: monotonic seconds.
    """

    kube: Kube
    namespace: str
    identity: str
    seconds: int
    clock: Callable[[], float]
    _observed: dict[str, tuple[tuple[str, str], float]] = field(default_factory=dict)
    """By name of a Lease that another replica holds: its uid and version, and when this replica first saw this version."""

    async def acquire(self, name: str, about: str) -> HeldLease:
        """Create the Lease, or take over an expired Lease.

        Raises:
            LeaseBusy: another replica holds it.
            KubeError: the API server refused, or could not be reached.
        """
        body = self._body(name, about)
        # A Lease that another replica held at the last try probably exists, so it is not created first.
        lease = None if name in self._observed else await self._create(body)
        lease = lease or await self._take_over(body)
        self._observed.pop(name, None)
        return lease

    async def recover(self, name: str, about: str, holder: str) -> HeldLease | None:
        """Renew the Lease if the identity of its holder begins with `holder`, and return the Lease; otherwise return None.

        Raises:
            LeaseBusy: another replica acquired it meanwhile.
            KubeError: the API server refused, or could not be reached.
        """
        current = await self.kube.get("Lease", self.namespace, name)
        if current is None or not _holder(current).startswith(holder):
            return None
        return await self._replace(current, self._body(name, about))

    async def renew(self, lease: HeldLease) -> HeldLease:
        """Renew the Lease for its full duration.

        Raises:
            LeaseBusy: the Lease expired, and another replica acquired it.
            KubeError: the API server refused, or could not be reached.
        """
        meta = lease.body["metadata"]
        body = self._body(meta["name"], meta["annotations"][ANNOTATION_ABOUT])
        body["spec"]["acquireTime"] = lease.body["spec"]["acquireTime"]
        return await self._replace(lease.body, body)

    async def release(self, lease: HeldLease) -> None:
        """Delete the Lease, unless another replica took it over. A Lease that cannot be deleted expires."""
        meta = lease.body["metadata"]
        try:
            await self.kube.delete(
                "Lease", self.namespace, meta["name"], meta["uid"], version=meta["resourceVersion"]
            )
        except KubeError as error:
            log.warning(
                "Lease %s/%s could not be deleted, and expires in %d s: %s",
                self.namespace,
                meta["name"],
                self.seconds,
                error,
            )

    async def _create(self, body: Json) -> HeldLease | None:
        """Create the Lease; None if it exists."""
        # NB: the duration starts before the request, so that the Lease expires here no later than for other replicas.
        until = self.clock() + self.seconds
        try:
            return HeldLease(await self.kube.create(body), until)
        except KubeError as error:
            if error.status != 409:
                raise
            return None

    async def _take_over(self, body: Json) -> HeldLease:
        """Replace the existing Lease if its holder has let it expire; create the Lease if it was deleted meanwhile."""
        name = body["metadata"]["name"]
        current = await self.kube.get("Lease", self.namespace, name)
        if current is None:
            lease = await self._create(body)
            if lease is None:
                raise LeaseBusy(f"Lease {self.namespace}/{name} was just acquired by another replica")
            return lease
        state = (current["metadata"]["uid"], current["metadata"]["resourceVersion"])
        now = self.clock()
        last_state, since = self._observed.get(name, (None, now))
        if state != last_state:
            since = now
            self._observed[name] = (state, now)
        # The holder may run with a longer duration than this replica.
        holder_seconds = (current.get("spec") or {}).get("leaseDurationSeconds") or 0
        if now - since < max(self.seconds, holder_seconds):
            raise LeaseBusy(f"Lease {self.namespace}/{name} is held by {_holder(current)}")
        log.warning("took over Lease %s/%s, which %s let expire", self.namespace, name, _holder(current))
        return await self._replace(current, body)

    async def _replace(self, current: Json, body: Json) -> HeldLease:
        """Write the Lease if it has not changed since it was read."""
        meta = current["metadata"]
        until = self.clock() + self.seconds
        body["metadata"] |= {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        try:
            return HeldLease(await self.kube.apply(body), until)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            what = "was deleted" if error.status == 404 else "was acquired by another replica"
            raise LeaseBusy(f"Lease {self.namespace}/{meta['name']} {what}") from error

    def _body(self, name: str, about: str) -> Json:
        """The Lease as this process acquires it now."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": {names.LABEL_MANAGED_BY: names.FIELD_MANAGER},
                "annotations": {ANNOTATION_ABOUT: about},
            },
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.seconds,
                "acquireTime": now,
                "renewTime": now,
            },
        }


def _holder(lease: Json) -> str:
    """The identity of a Lease's holder; empty if it has none."""
    return str((lease.get("spec") or {}).get("holderIdentity") or "")
