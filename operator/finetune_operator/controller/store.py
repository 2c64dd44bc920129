"""The operator's cache: FineTuneJobs, ModelPromotions and FineTuneSchedules with their children.

Three sources write to the cache independently: the watches, the periodic lists, and the operator's own writes. Resource versions
order these writes: an older object never replaces a newer one, and a deleted object does not return.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.controller.projection import COMPANIONS, project
from finetune_operator.controller.promotion_index import PromotionIndex
from finetune_operator.owners import find_creator

Key = tuple[str, str]  # namespace, name
Identity = tuple[str, str]  # namespace, uid
RESOURCES = ("FineTuneJob", "ModelPromotion", "FineTuneSchedule")
# Those that own children, in the order of the lists.
_OWNERS = ("FineTuneJob", "ModelPromotion")
CHILDREN = ("Job", "Pod", *COMPANIONS)
KINDS = (*CHILDREN, *RESOURCES)
_DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds")


def _key(body: Json) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _version(body: Json) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)


def _keep_first_deletion(stored: Json | None, body: Json) -> Json:
    """The object with the deletion fields of the first request to delete it.

    NB: the kubelet deletes a stopped pod once more, without a grace period. The fields of this second request would suggest that the
    containers had ended before anyone deleted the pod.
    """
    deletion = {
        name: value for name, value in (stored or {}).get("metadata", {}).items() if name in _DELETION
    }
    if stored is None or not deletion or _identity(stored) != _identity(body):
        return body
    return {**body, "metadata": {**body["metadata"], **deletion}}


def _no_owner(kind: str, body: Json) -> Identity | None:
    """The default of `owner_of`: every child is foreign."""


def _no_jobs(_: Json) -> set[Identity]:
    """The default of `recorded_jobs`: no status records a Job."""
    return set()


@dataclass
class Store:
    """The cache. Not thread-safe: use it on the event loop only.

    Attributes:
        owner_of: the Job of a Pod, or the FineTuneJob or ModelPromotion of any other child; None for a foreign object, which is not
            kept.
        recorded_jobs: the Jobs that a FineTuneJob's status records. Their pods belong to the FineTuneJob even after the Job
            was deleted, which may happen while the operator is down.
    """

    owner_of: Callable[[str, Json], Identity | None] = _no_owner
    recorded_jobs: Callable[[Json], set[Identity]] = _no_jobs
    _objects: dict[str, dict[Key, Json]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _by_owner: dict[str, dict[Identity, set[Key]]] = field(
        default_factory=lambda: {kind: defaultdict(set) for kind in CHILDREN}
    )
    """By kind of child: the keys of the children of each owner."""
    _created_jobs: dict[Identity, set[Key]] = field(default_factory=lambda: defaultdict(set))
    """The keys of the FineTuneJobs of each FineTuneSchedule, and of each FineTuneJob with a sweep."""
    promotion_index: PromotionIndex = field(default_factory=PromotionIndex)
    _jobs: set[Identity] = field(default_factory=set)
    """The identities of the Jobs in the store."""
    _recorded: dict[Identity, set[Identity]] = field(default_factory=dict)
    """By FineTuneJob: the Jobs that it records."""
    _deleted_jobs: dict[Identity, dict[Identity, int]] = field(default_factory=dict)
    """By FineTuneJob: its deleted Jobs, and the versions at which they were deleted. The pods may outlive their Job."""
    _deletions: dict[str, dict[Key, int]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Versions at which objects were deleted, since the last list."""
    _tombstones: dict[Identity, dict[str, Json]] = field(default_factory=dict)
    """Pods that ended and no longer exist, in their last state, by their Job and index; kept while the Job exists. Of each completion index,
    only the last pod is kept."""
    _list_versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Version of the last list of each kind."""

    def of(self, kind: str) -> dict[Key, Json]:
        """Every object of a kind."""
        return self._objects[kind]

    @property
    def promotions(self) -> dict[Key, Json]:
        """ModelPromotions."""
        return self._objects["ModelPromotion"]

    @property
    def finetunejobs(self) -> dict[Key, Json]:
        """FineTuneJobs."""
        return self._objects["FineTuneJob"]

    def finetunejobs_of(self, owner: Identity) -> list[Json]:
        """The FineTuneJobs of a FineTuneSchedule, or of a FineTuneJob with a sweep."""
        return [self._objects["FineTuneJob"][key] for key in sorted(self._created_jobs.get(owner, ()))]

    def jobs_of(self, owner: Identity) -> list[Json]:
        """The Jobs of a FineTuneJob or a ModelPromotion."""
        return [self._objects["Job"][key] for key in sorted(self._by_owner["Job"].get(owner, ()))]

    def companions_of(self, ftj: Identity) -> frozenset[tuple[str, str]]:
        """Kind and name of each Service, ConfigMap and NetworkPolicy of a FineTuneJob."""
        return frozenset(
            (kind, name) for kind in COMPANIONS for _namespace, name in self._by_owner[kind].get(ftj, ())
        )

    def pods_of(self, owner: Identity) -> list[Json]:
        """The Pods of the Jobs of a FineTuneJob or a ModelPromotion, including its deleted Jobs."""
        present = map(_identity, self.jobs_of(owner))
        jobs = {*present, *self._deleted_jobs.get(owner, ()), *self._recorded.get(owner, ())}
        keys = {key for job in jobs for key in self._by_owner["Pod"].get(job, ())}
        return [self._objects["Pod"][key] for key in sorted(keys)]

    def tombstones(self, ftj: Identity) -> list[Json]:
        """Pods of a FineTuneJob that ended and no longer exist, each in its last state.

        NB: when one pod of a gang is deleted, its Job deletes the others. By the time the Job is marked as failed, the
        pods that explain the failure may no longer exist.
        """
        jobs = (self._tombstones.get(_identity(job), {}) for job in self.jobs_of(ftj))
        return [pods[key] for pods in jobs for key in sorted(pods)]

    def put(self, kind: str, body: Json) -> None:
        """Store an object from a watch, a list or a write of the operator; an outdated object is ignored."""
        # An object that is older than the last list and not in it was deleted: a late watch event does not restore it.
        if _key(body) in self._objects[kind] or _version(body) > self._list_versions[kind]:
            self._put(kind, body)

    def update(self, kind: str, event_type: str | None, body: Json) -> bool:
        """Store what a watch delivers. Returns whether that is news, which a state that the operator itself wrote is not.

        Args:
            event_type: the type of the event; None for an object of the list with which a watch starts.
        """
        if event_type == "DELETED":
            self.drop(kind, body)
            return True
        is_news = not self.has(kind, body)
        self.put(kind, body)
        return is_news

    def has(self, kind: str, body: Json) -> bool:
        """Whether the store has this object in this state or a newer one, for example because the operator itself wrote it."""
        stored = self._objects[kind].get(_key(body))
        return (
            stored is not None and _identity(stored) == _identity(body) and _version(stored) >= _version(body)
        )

    def drop(self, kind: str, body: Json) -> None:
        """Remove a deleted object; a newer object of the same name stays.

        Args:
            body: the last state of the deleted object.
        """
        key, version = _key(body), _version(body)
        stored = self._objects[kind].get(key)
        if stored is None and kind in CHILDREN and self.owner_of(kind, body) is None:
            # A foreign object: the store never kept it, and needs no record of its deletion.
            return
        if stored is None or _version(stored) <= version:
            self._keep_tombstone(kind, _keep_first_deletion(stored, body))
            self._remove(kind, key, version)
            self._deletions[kind][key] = version

    def replace(self, kind: str, bodies: Iterable[Json], version: int) -> News:
        """Replace the stored objects of a kind with a list from the API server: an object that is not in the list no longer exists.

        An interrupted watch misses deletions. Objects that are newer than the list, from watches and the operator's own
        writes, stay.

        Args:
            version: the resource version of the list.

        Returns:
            What no watch and no write of the operator had brought before.
        """
        listed = {_key(body): body for body in bodies}
        vanished = {
            key: stored
            for key, stored in self._objects[kind].items()
            if key not in listed and _version(stored) <= version
        }
        for key, stored in vanished.items():
            self._keep_tombstone(kind, stored)
            self._remove(kind, key, version)
        self._deletions[kind] = {key: at for key, at in self._deletions[kind].items() if at > version}
        has_changed = bool(vanished)
        for key, body in listed.items():
            if self.has(kind, body):
                continue
            was_stored = key in self._objects[kind]
            self._put(kind, body)
            # A foreign object is not kept, and an object whose deletion is known does not return. An orphaned child is removed.
            has_changed |= self.has(kind, body) or (was_stored and key not in self._objects[kind])
        self._list_versions[kind] = version
        if kind == "Pod":
            self._forget_deleted_jobs(version)
        elif kind == _OWNERS[-1]:
            # NB: only when all kinds of owners are listed: before, an owner may exist that the store does not have.
            owners = {_identity(body) for owner in _OWNERS for body in self._objects[owner].values()}
            listed_version = min(self._list_versions[owner] for owner in _OWNERS)
            for child in ("Job", *COMPANIONS):
                self._drop_unowned(child, owners, listed_version)
            # NB: Pods are dropped only now, not when they are listed: at the first list, the FineTuneJobs that record deleted Jobs are not
            # yet known, and the pods of these Jobs must stay.
            pod_owners = self._jobs.union(*self._deleted_jobs.values(), *self._recorded.values())
            self._drop_unowned("Pod", pod_owners, self._list_versions["Job"])
        return News(has_changed, list(vanished.values()))

    def _put(self, kind: str, body: Json) -> None:
        """Store an object, unless a newer state or its deletion is recorded."""
        key = _key(body)
        stored = self._objects[kind].get(key)
        stored_version = _version(stored) if stored else 0
        deleted_version = self._deletions[kind].get(key, 0)
        if _version(body) < max(stored_version, deleted_version):
            return
        if kind in CHILDREN:
            owner = self.owner_of(kind, body)
            if stored and (_identity(stored), self.owner_of(kind, stored)) != (_identity(body), owner):
                # NB: the child was recreated, or orphaned by `kubectl delete --cascade=orphan`: remove it from its old owner.
                self._remove(kind, key, _version(body))
            if owner is None:
                return
            self._by_owner[kind][owner].add(key)
            if kind == "Job":
                self._jobs.add(_identity(body))
        projection = self._objects[kind][key] = project(kind, _keep_first_deletion(stored, body))
        if stored:
            self._unlink(kind, key, stored)
        self._link(kind, key, projection)

    def _keep_tombstone(self, kind: str, body: Json) -> None:
        """Keep the last state of a pod that has ended while its Job exists; forget it when the Job is deleted."""
        if kind == "Job":
            self._tombstones.pop(_identity(body), None)
        elif kind == "Pod" and body.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            job = self.owner_of(kind, body)
            if job in self._jobs:
                # NB: Kueue may stop and resume a Job any number of times, each time with other pods.
                self._tombstones.setdefault(job, {})[_index(body)] = project(kind, body)

    def _remove(self, kind: str, key: Key, version: int) -> None:
        """Remove an object and its link to its owner. A removed Job is recorded as deleted."""
        body = self._objects[kind].pop(key, None)
        if body:
            self._unlink(kind, key, body)
        owner = self.owner_of(kind, body) if body and kind in CHILDREN else None
        if body is None or owner is None:
            return
        owned = self._by_owner[kind][owner]
        owned.discard(key)
        if not owned:
            del self._by_owner[kind][owner]
        if kind == "Job":
            self._jobs.discard(_identity(body))
            self._deleted_jobs.setdefault(owner, {})[_identity(body)] = version

    def _link(self, kind: str, key: Key, body: Json) -> None:
        """Add a FineTuneJob or a ModelPromotion to what resources are looked up by."""
        if kind == "ModelPromotion":
            self.promotion_index.add(key, body)
        elif kind == "FineTuneJob":
            self._recorded[_identity(body)] = self.recorded_jobs(body)
            owner = find_creator(body)
            if owner:
                self._created_jobs[owner].add(key)

    def _unlink(self, kind: str, key: Key, body: Json) -> None:
        """Remove a FineTuneJob or a ModelPromotion, in its stored state, from what resources are looked up by."""
        if kind == "ModelPromotion":
            self.promotion_index.remove(key, body)
        elif kind == "FineTuneJob":
            self._recorded.pop(_identity(body), None)
            owner = find_creator(body)
            jobs = self._created_jobs.get(owner) if owner else None
            if owner and jobs:
                jobs.discard(key)
                if not jobs:
                    del self._created_jobs[owner]

    def _forget_deleted_jobs(self, version: int) -> None:
        """Forget the Jobs that were deleted before a list of Pods if no Pod of the list belongs to them.

        Args:
            version: the resource version of the list.
        """
        for ftj, jobs in list(self._deleted_jobs.items()):
            remaining = {job: at for job, at in jobs.items() if at > version or job in self._by_owner["Pod"]}
            self._deleted_jobs[ftj] = remaining
            if not remaining:
                del self._deleted_jobs[ftj]

    def _drop_unowned(self, kind: str, owners: set[Identity], version: int) -> None:
        """Drop the children whose owner does not exist, unless they are newer than the list of owners.

        Args:
            version: the resource version of the list of owners.
        """
        for key, body in list(self._objects[kind].items()):
            if _version(body) <= version and self.owner_of(kind, body) not in owners:
                self._remove(kind, key, version)


class News(NamedTuple):
    """What a list brought that no watch and no write of the operator had brought before.

    has_changed: whether anything has changed.
    vanished: the objects that no longer exist, in their last known state.
    """

    has_changed: bool
    vanished: list[Json]


def _index(pod: Json) -> str:
    """The completion index of a pod, or the name of a pod whose Job is not Indexed."""
    meta = pod["metadata"]
    return str((meta.get("annotations") or {}).get(names.ANNOTATION_INDEX, meta["name"]))


def _identity(body: Json) -> Identity:
    """Return the namespace and the uid of an object, to which the owner references of its children refer."""
    return body["metadata"]["namespace"], str(body["metadata"].get("uid"))
