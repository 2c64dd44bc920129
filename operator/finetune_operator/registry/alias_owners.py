"""Which installation of the operator moves an alias: a tag of the registered model that its owner renews.

A Lease and the oldest ModelPromotion decide within a cluster; two clusters share only the registry. MLflow overwrites a tag without
comparing, so an installation that takes an alias waits, reads the tag back, and owns the alias only if the tag is still its own: the last
writer wins. The clocks of installations differ, so a reader considers an owner gone after it has seen the same tag for the whole lease
on its own clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol, runtime_checkable

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube, KubeError
from finetune_operator.registry.base import RegisteredModel, Registry
from finetune_operator.registry.ownership import LEASE_SECONDS, SETTLE_SECONDS, UNSUPPORTED, Ownership

log = logging.getLogger(__name__)

_RENEWAL_INTERVAL = timedelta(minutes=15)
_INSTALLATION = "finetune-installation"
# A tag of an operator has less than 700.
_MAX_CONTENT_CHARS = 1024
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# A namespace and a name, as long as Kubernetes allows them.
_PROMOTION = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
# Longer than any wait between two reads of a promotion, of which each failure makes the next wait longer.
_SIGHTING_SECONDS = 24 * 3600.0
# Problems that show that the registry does not let this promotion tag the model.
_REFUSALS = (ConditionReason.MLFLOW_FORBIDDEN, ConditionReason.MLFLOW_REFUSED)


@runtime_checkable
class TaggableRegistry(Protocol):
    """A registry whose models have tags."""

    def set_model_tag(self, name: str, key: str, value: str) -> None:
        """Set a tag of a registered model."""


class _Record(NamedTuple):
    """The content of the tag. `promotion` is namespace/name; `time` is on the clock of the owner."""

    installation: str
    promotion: str
    time: datetime


class _Key(NamedTuple):
    registry_uri: str
    model: str
    tag: str


class _Refusal(NamedTuple):
    """Whose tag was refused. NB: another promotion may have other credentials."""

    registry_uri: str
    model: str
    promotion: str


class _Sighting(NamedTuple):
    """The digest of a tag, and when this process saw it first and last."""

    digest: str
    since: float
    last: float


@dataclass
class AliasOwners:
    """Reads, takes and renews the tags.

    Attributes:
        namespace: the namespace of this installation.
        clock: monotonic seconds.
        now: the time that the tags of this installation have.
    """

    kube: Kube
    namespace: str
    clock: Callable[[], float]
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _installation: str = ""
    _sightings: dict[_Key, _Sighting] = field(default_factory=dict)
    """By alias of another installation: what this process saw of its tag."""
    _taken: dict[_Key, float] = field(default_factory=dict)
    """When this process took an alias that was not its installation's."""
    _refused: dict[_Refusal, float] = field(default_factory=dict)
    """When the registry last refused a tag. After a renewal interval, the tag is tried again."""

    async def find(self, registry: Registry, model: RegisteredModel, alias: str, promotion: str) -> Ownership:
        """Find who owns an alias.

        Args:
            promotion: namespace/name of the ModelPromotion that manages the alias here.

        Raises:
            KubeError: the identity of this installation could not be read.
        """
        if not isinstance(registry, TaggableRegistry):
            return UNSUPPORTED
        self._prune()
        key = _Key(registry.uri, model.name, names.owner_tag(alias))
        content = model.tags.get(key.tag, "")
        record, installation = _parse(content), await self._read_installation()
        if record and record.installation != installation and self._is_live(key, content):
            return Ownership(
                "Foreign", f"ModelPromotion {record.promotion} of installation {record.installation}"
            )
        age = self.now() - record.time if record else timedelta(0)
        if record is None or record.installation != installation or age.total_seconds() >= LEASE_SECONDS:
            # After the lease, another installation may be taking the alias, so this one takes it again like a new one.
            is_refused = _Refusal(registry.uri, model.name, promotion) in self._refused
            return UNSUPPORTED if is_refused else Ownership("Unclaimed")
        if key in self._taken:
            return Ownership("Settling")
        is_fresh = record.promotion == promotion and timedelta(0) <= age < _RENEWAL_INTERVAL
        return Ownership("Ours" if is_fresh else "Due")

    async def take(self, registry: Registry, name: str, alias: str, promotion: str, *, is_new: bool) -> bool:
        """Write the tag of this installation. If the registry refuses it, the promotion moves the alias without an owner for a time.

        Args:
            name: the registered model.
            is_new: whether the alias was not owned by this installation.

        Returns:
            Whether the alias may be this installation's; False if another installation owns it, whose tag then stays.

        Raises:
            ExternalError: the tag could not be written, or the registry refused to renew it.
            KubeError: the identity of this installation could not be read.
        """
        if not isinstance(registry, TaggableRegistry):
            return True
        key, installation = _Key(registry.uri, name, names.owner_tag(alias)), await self._read_installation()
        # NB: the model that the decision is about was read some time ago.
        model = await asyncio.to_thread(registry.model, name)
        current = model.tags.get(key.tag, "") if model else ""
        record = _parse(current)
        if record and record.installation != installation and self._is_live(key, current):
            return False
        content = json.dumps(
            {
                "installation": installation,
                "promotion": promotion,
                "time": self.now().isoformat(timespec="seconds"),
            }
        )
        if is_new:
            self._taken[key] = self.clock()
        try:
            await asyncio.to_thread(registry.set_model_tag, name, key.tag, content)
        except ExternalError as error:
            # NB: an alias that this installation owns is never moved without its tag, which other installations read.
            if not is_new or error.problem.reason not in _REFUSALS:
                raise
            log.warning(
                "%s: aliases are moved without a record of their owner, because the model %s cannot be tagged: %s",
                promotion,
                name,
                error.problem.message,
            )
            self._refused[_Refusal(registry.uri, name, promotion)] = self.clock()
        return True

    def _is_live(self, key: _Key, content: str) -> bool:
        """Whether another installation may still own the alias: this process has not seen its tag unchanged for a whole lease."""
        now, digest = self.clock(), hashlib.sha256(content.encode()).hexdigest()
        sighting = self._sightings.get(key)
        since = sighting.since if sighting and sighting.digest == digest else now
        self._sightings[key] = _Sighting(digest, since, last=now)
        return now - since < LEASE_SECONDS

    def _prune(self) -> None:
        """Forget what no longer counts, and the tags of aliases that no promotion has read for a day."""
        now = self.clock()
        self._taken = {key: time for key, time in self._taken.items() if now - time < SETTLE_SECONDS}
        self._refused = {
            refusal: time
            for refusal, time in self._refused.items()
            if now - time < _RENEWAL_INTERVAL.total_seconds()
        }
        self._sightings = {
            key: item for key, item in self._sightings.items() if now - item.last < _SIGHTING_SECONDS
        }

    async def _read_installation(self) -> str:
        """The identity of this installation: the uid of a Lease in its namespace, which is created once and never held."""
        if not self._installation:
            lease = await self.kube.get("Lease", self.namespace, _INSTALLATION) or await self._create_lease()
            self._installation = str(lease["metadata"]["uid"])
        return self._installation

    async def _create_lease(self) -> Json:
        body: Json = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": _INSTALLATION,
                "namespace": self.namespace,
                "labels": {names.LABEL_MANAGED_BY: names.FIELD_MANAGER},
            },
            "spec": {},
        }
        try:
            return await self.kube.create(body)
        except KubeError as error:
            # Another replica was faster.
            existing = (
                await self.kube.get("Lease", self.namespace, _INSTALLATION) if error.status == 409 else None
            )
            if existing is None:
                raise
            return existing


def _parse(content: str) -> _Record | None:
    """The record in a tag; None if the tag is missing or was not written by an operator.

    NB: everybody who may tag the model can write any text, and a condition shows the record.
    """
    if len(content) > _MAX_CONTENT_CHARS:
        return None
    try:
        fields = json.loads(content)
        record = _Record(fields["installation"], fields["promotion"], datetime.fromisoformat(fields["time"]))
        is_valid = _UID.fullmatch(record.installation) and _PROMOTION.fullmatch(record.promotion)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if is_valid and record.time.tzinfo else None
