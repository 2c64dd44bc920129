"""What the watches delivered: FineTuneJobs and ModelPromotions, and the Jobs and Pods that belong to the former.

Three streams write here, and none waits for the others: the watches, the periodic lists, and our own writes. So
resource versions decide what is news: nothing replaces what is newer, and nothing that was deleted comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from finetune_crds.base import Json
from finetune_operator import names

Key = tuple[str, str]  # namespace, name
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


@dataclass
class Store:
    """The operator's own copy of what exists. Single-threaded: it belongs to the event loop."""

    _held: dict[str, dict[Key, Json]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _by_owner: dict[str, dict[str, set[Key]]] = field(
        default_factory=lambda: {kind: defaultdict(set) for kind in KINDS}
    )
    _gone: dict[str, dict[Key, int]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Versions at which objects were deleted, since the last list."""
    _tombstones: dict[str, dict[Key, Json]] = field(default_factory=dict)
    """Pods that failed and are gone, by the uid of their Job, for as long as it is there."""
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
    def jobs(self) -> dict[Key, Json]:
        """FineTuneJobs."""
        return self._held["FineTuneJob"]

    def children(self, kind: str, uid: str) -> list[Json]:
        """The Jobs or Pods of a FineTuneJob."""
        return [self._held[kind][key] for key in sorted(self._by_owner[kind].get(uid, ()))]

    def tombstones(self, uid: str) -> list[Json]:
        """Pods of a FineTuneJob that failed and are gone, each as it last was.

        NB: when one pod of a gang is deleted, its Job deletes the others, and may be said to have failed when none is
        left to tell why.
        """
        jobs = (self._tombstones.get(_uid(child), {}) for child in self.children("Job", uid))
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
        if held is None or _version(held) <= version:
            self._remove(kind, key)
            self._gone[kind][key] = version
            self._keep_tombstone(kind, body)

    def replace(self, kind: str, bodies: Iterable[Json], version: int) -> None:
        """Everything of a kind, from a list of this version: what is not in it no longer exists.

        A watch that broke off never tells of what was deleted meanwhile. What the watches and our own writes
        told while the list was under way is newer than the list, and stays.
        """
        listed = {_key(body): body for body in bodies}
        for key, held in list(self._held[kind].items()):
            if key not in listed and _version(held) <= version:
                self._remove(kind, key)
                self._keep_tombstone(kind, held)
        self._gone[kind] = {key: at for key, at in self._gone[kind].items() if at > version}
        for body in listed.values():
            self._put(kind, body)
        self._listed[kind] = version

    def _put(self, kind: str, body: Json) -> None:
        key = _key(body)
        held = self._held[kind].get(key)
        if _version(body) < max(_version(held) if held else 0, self._gone[kind].get(key, 0)):
            return
        self._remove(kind, key)
        self._held[kind][key] = _slim(kind, body)
        if kind in CHILDREN:
            self._by_owner[kind][_owner(body)].add(key)

    def _keep_tombstone(self, kind: str, body: Json) -> None:
        """Keep what a pod said at its end while its Job is there; forget the pods of a Job that is gone."""
        if kind == "Job":
            self._tombstones.pop(_uid(body), None)
        elif kind == "Pod" and body.get("status", {}).get("phase") == "Failed":
            job = str(body["metadata"]["labels"].get(names.LABEL_CONTROLLER))
            if any(_uid(child) == job for child in self.children("Job", _owner(body))):
                self._tombstones.setdefault(job, {})[_key(body)] = _slim(kind, body)

    def _remove(self, kind: str, key: Key) -> None:
        body = self._held[kind].pop(key, None)
        if body is None or kind not in CHILDREN:
            return
        owned = self._by_owner[kind][_owner(body)]
        owned.discard(key)
        if not owned:
            del self._by_owner[kind][_owner(body)]


def _uid(body: Json) -> str:
    return str(body["metadata"].get("uid"))


def _owner(body: Json) -> str:
    return str(body["metadata"]["labels"][names.LABEL_UID])
