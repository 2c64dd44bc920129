"""Reads and takes the Lease of a preparation: of several jobs with the same preparation, the holder of the Lease runs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_crds.base import Json
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.children import is_child
from finetune_operator.finetunejob.decision import TakeLease
from finetune_operator.finetunejob.model import FineTuneJob, PreparationLease
from finetune_operator.finetunejob.preparation import backends, preparation_lease
from finetune_operator.kube import Kube, KubeError
from finetune_operator.owners import find_owner

log = logging.getLogger(__name__)


@dataclass
class PreparationLeases:
    """The Leases of preparations, in the namespaces of their jobs."""

    kube: Kube
    store: Store

    async def read(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> PreparationLease | None:
        """The Lease of a job that is about to prepare; None for any other job, or if the operator is not allowed to read Leases.

        Args:
            jobs: the job's child Jobs, by name.

        Raises:
            KubeError: the API server could not be read.
        """
        name = preparation_lease.lease_name(ftj) if backends.has_to_prepare(ftj, jobs) else None
        if name is None:
            return None
        try:
            lease = await self.kube.get("Lease", ftj.namespace, name)
        except KubeError as error:
            if error.status != 403:
                raise
            # NB: an installation may use its own role, written for an earlier release that did not need this permission.
            log.warning(
                "%s: cannot check whether another job prepares the same data, so this job prepares it: %s",
                ftj.key,
                error,
            )
            return None
        return PreparationLease(lease, await self._find_holder(lease) if lease else None)

    async def _find_holder(self, lease: Json) -> Json | None:
        """The FineTuneJob that a Lease belongs to; None if it no longer exists."""
        lease_owner = find_owner("Lease", lease)
        if lease_owner is None:
            return None
        name = str((lease.get("spec") or {}).get("holderIdentity"))
        holder = self.store.finetunejobs.get((lease_owner.namespace, name))
        if holder is None or holder["metadata"]["uid"] != lease_owner.uid:
            # NB: the holder may be so new that the cache does not have it yet.
            holder = await self.kube.get("FineTuneJob", lease_owner.namespace, name)
        # NB: another FineTuneJob may have the name of a deleted holder.
        return holder if holder and holder["metadata"]["uid"] == lease_owner.uid else None

    async def take(self, ftj: FineTuneJob, request: TakeLease) -> None:
        """Create the Lease, after deleting the Lease that it replaces. If several jobs try at once, only one succeeds.

        Raises:
            KubeError: another job was faster (409), or the API server refused or could not be reached.
        """
        name = request.body["metadata"]["name"]
        if request.replaces:
            replaced = request.replaces["metadata"]
            await self.kube.delete(
                "Lease", ftj.namespace, name, replaced["uid"], version=replaced["resourceVersion"]
            )
        try:
            await self.kube.create(request.body)
        except KubeError as error:
            if error.status != 409:
                raise
            # An interrupted pass of this job may have created the Lease.
            existing = await self.kube.get("Lease", ftj.namespace, name)
            if existing is None or not is_child(existing, ftj):
                raise KubeError(
                    409, f"another job has started the preparation of {ftj.key}: retrying"
                ) from error
