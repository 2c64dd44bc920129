"""What the watches delivered: FineTuneJobs and ModelPromotions, and the Jobs and Pods that belong to the former.

Three streams write here, and none waits for the others: the watches, the periodic lists, and our own writes. So
resource versions decide what is news: nothing replaces what is newer, and nothing that was deleted comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from finetune_crds.base import Json

Key = tuple[str, str]  # namespace, name
Owner = tuple[str, str]  # namespace, uid
RESOURCES = ("FineTuneJob", "ModelPromotion")
CHILDREN = ("Job", "Pod")
KINDS = (*CHILDREN, *RESOURCES)


def _key(body: Json) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _version(body: Json) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)


def _slim(kind: str, body: Json) -> Json:
    """Without managedFields, which are most of an object's size; those of a promotion tell who changed it."""
    if kind == "ModelPromotion":
        return body
    meta = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": meta}


def _nobody(kind: str, body: Json) -> Owner | None:
    """No Job and no Pod belongs to anything."""


def _none(_: Json) -> set[Owner]:
    """No FineTuneJob records a Job."""
    return set()


@dataclass
class Store:
    """The operator's own copy of what exists. Single-threaded: it belongs to the event loop.

    Attributes:
        owner_of: the FineTuneJob of a Job, or the Job of a Pod; None for a foreign object, which is not kept.
        recorded_jobs: the Jobs that a FineTuneJob records. Their pods belong to it also when a Job is gone: the operator
            may not have run when it went.
    """

    owner_of: Callable[[str, Json], Owner | None] = _nobody
    recorded_jobs: Callable[[Json], set[Owner]] = _none
    _held: dict[str, dict[Key, Json]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _by_owner: dict[str, dict[Owner, set[Key]]] = field(
        default_factory=lambda: {kind: defaultdict(set) for kind in CHILDREN}
    )
    _jobs: set[Owner] = field(default_factory=set)
    """The Jobs that are there, as their Pods name them."""
    _recorded: dict[Owner, set[Owner]] = field(default_factory=dict)
    """By FineTuneJob: the Jobs that it records."""
    _past: dict[Owner, dict[Owner, int]] = field(default_factory=dict)
    """By FineTuneJob: its Jobs that are gone, and the versions at which they went. Their pods may outlive them."""
    _gone: dict[str, dict[Key, int]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Versions at which objects were deleted, since the last list."""
    _tombstones: dict[Owner, dict[Key, Json]] = field(default_factory=dict)
    """Pods that failed and are gone, by their Job, for as long as it is there."""
    _listed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Version of the last list of each kind."""

    def of(self, kind: str) -> dict[Key, Json]:
        """Every object of a kind."""
        return self._held[kind]

    @property
    def promotions(self) -> dict[Key, Json]:
        """ModelPromotions."""
        return self._held["ModelPromotion"]

    @property
    def finetunejobs(self) -> dict[Key, Json]:
        """FineTuneJobs."""
        return self._held["FineTuneJob"]

    def jobs_of(self, ftj: Owner) -> list[Json]:
        """The Jobs of a FineTuneJob."""
        return [self._held["Job"][key] for key in sorted(self._by_owner["Job"].get(ftj, ()))]

    def pods_of(self, ftj: Owner) -> list[Json]:
        """The Pods of a FineTuneJob's Jobs, and of Jobs of it that are gone."""
        present = map(_identity, self.jobs_of(ftj))
        jobs = {*present, *self._past.get(ftj, ()), *self._recorded.get(ftj, ())}
        keys = {key for job in jobs for key in self._by_owner["Pod"].get(job, ())}
        return [self._held["Pod"][key] for key in sorted(keys)]

    def tombstones(self, ftj: Owner) -> list[Json]:
        """Pods of a FineTuneJob that failed and are gone, each as it last was.

        NB: when one pod of a gang is deleted, its Job deletes the others, and may be said to have failed when none is
        left to tell why.
        """
        jobs = (self._tombstones.get(_identity(job), {}) for job in self.jobs_of(ftj))
        return [pods[key] for pods in jobs for key in sorted(pods)]

    def put(self, kind: str, body: Json) -> None:
        """An object as a watch, a list or our own write delivered it; old news is ignored."""
        # What the last list did not have was gone by then, whatever a late watch says.
        if _key(body) in self._held[kind] or _version(body) > self._listed[kind]:
            self._put(kind, body)

    def drop(self, kind: str, body: Json) -> None:
        """An object is gone, as its last state tells; one of the same name that came later stays."""
        key, version = _key(body), _version(body)
        held = self._held[kind].get(key)
        if held is None and kind in CHILDREN and self.owner_of(kind, body) is None:
            return
        if held is None or _version(held) <= version:
            self._keep_tombstone(kind, body)
            self._remove(kind, key, version)
            self._gone[kind][key] = version

    def replace(self, kind: str, bodies: Iterable[Json], version: int) -> None:
        """Everything of a kind, from a list of this version: what is not in it no longer exists.

        A watch that broke off never tells of what was deleted meanwhile. What the watches and our own writes
        told while the list was under way is newer than the list, and stays.
        """
        listed = {_key(body): body for body in bodies}
        for key, held in list(self._held[kind].items()):
            if key not in listed and _version(held) <= version:
                self._keep_tombstone(kind, held)
                self._remove(kind, key, version)
        self._gone[kind] = {key: at for key, at in self._gone[kind].items() if at > version}
        for body in listed.values():
            self._put(kind, body)
        self._listed[kind] = version
        if kind == "Pod":
            self._forget_past(version)
        elif kind == "FineTuneJob":
            self._drop_strangers("Job", set(map(_identity, self.finetunejobs.values())), version)
            # NB: not when the Pods are listed. They come first, and FineTuneJobs record Jobs that are gone.
            known = self._jobs.union(*self._past.values(), *self._recorded.values())
            self._drop_strangers("Pod", known, self._listed["Job"])

    def _put(self, kind: str, body: Json) -> None:
        key = _key(body)
        held = self._held[kind].get(key)
        if _version(body) < max(_version(held) if held else 0, self._gone[kind].get(key, 0)):
            return
        if kind in CHILDREN:
            owner = self.owner_of(kind, body)
            if held and (_identity(held), self.owner_of(kind, held)) != (_identity(body), owner):
                # NB: made again; or orphaned, as `kubectl delete --cascade=orphan` leaves it.
                self._remove(kind, key, _version(body))
            if owner is None:
                return
            self._by_owner[kind][owner].add(key)
            if kind == "Job":
                self._jobs.add(_identity(body))
        if kind == "FineTuneJob":
            if held:
                self._recorded.pop(_identity(held), None)
            self._recorded[_identity(body)] = self.recorded_jobs(body)
        self._held[kind][key] = _slim(kind, body)

    def _keep_tombstone(self, kind: str, body: Json) -> None:
        """Keep what a pod said at its end while its Job is there; forget the pods of a Job that is gone."""
        if kind == "Job":
            self._tombstones.pop(_identity(body), None)
        elif kind == "Pod" and body.get("status", {}).get("phase") == "Failed":
            job = self.owner_of(kind, body)
            if job in self._jobs:
                self._tombstones.setdefault(job, {})[_key(body)] = _slim(kind, body)

    def _remove(self, kind: str, key: Key, version: int) -> None:
        body = self._held[kind].pop(key, None)
        if body and kind == "FineTuneJob":
            self._recorded.pop(_identity(body), None)
        owner = self.owner_of(kind, body) if body and kind in CHILDREN else None
        if body is None or owner is None:
            return
        owned = self._by_owner[kind][owner]
        owned.discard(key)
        if not owned:
            del self._by_owner[kind][owner]
        if kind == "Job":
            self._jobs.discard(_identity(body))
            self._past.setdefault(owner, {})[_identity(body)] = version

    def _forget_past(self, version: int) -> None:
        """Forget the Jobs that went before this version of the Pods' list and have no Pods in it."""
        for ftj, jobs in list(self._past.items()):
            left = {job: at for job, at in jobs.items() if at > version or job in self._by_owner["Pod"]}
            self._past[ftj] = left
            if not left:
                del self._past[ftj]

    def _drop_strangers(self, kind: str, owners: set[Owner], version: int) -> None:
        """Drop the children whose owner was not there at a version at which it must have been: it came before them."""
        for key, body in list(self._held[kind].items()):
            if _version(body) <= version and self.owner_of(kind, body) not in owners:
                self._remove(kind, key, version)


def _identity(body: Json) -> Owner:
    """An object, as those that it owns name it."""
    return body["metadata"]["namespace"], str(body["metadata"].get("uid"))
