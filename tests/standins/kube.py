"""A stand-in for the API server, for tests of what stands on its client: objects in a dict, and what was asked."""

from __future__ import annotations

import copy
from typing import Any

from finetune_operator.kube import Kube, KubeError, Listing

Json = dict[str, Any]
Key = tuple[str, str, str]  # kind, namespace, name


class StandIn(Kube):
    """Objects and their versions. What is in `refuse`, by verb and kind, is answered with that error."""

    def __init__(self, *objects: Json) -> None:
        super().__init__()
        self.version = 100
        self.objects: dict[Key, Json] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.refuse: dict[tuple[str, str], KubeError] = {}
        for body in objects:
            self.keep(body)

    def keep(self, body: Json) -> Json:
        """Make it exist, at a new version."""
        self.version += 1
        stored = copy.deepcopy(body)
        assigned = {
            "namespace": "team",
            "uid": f"uid-{self.version}",
            "creationTimestamp": "2026-08-01T12:00:00Z",
        }
        stored["metadata"] = assigned | stored["metadata"] | {"resourceVersion": str(self.version)}
        self.objects[self._key(stored)] = stored
        return copy.deepcopy(stored)

    def _key(self, body: Json) -> Key:
        return body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]

    def _note(self, verb: str, kind: str, name: str) -> None:
        self.asked.append((verb, kind, name))
        if (verb, kind) in self.refuse:
            raise self.refuse[verb, kind]

    def done(self, *verbs: str) -> list[str]:
        """What was asked with these verbs, as Kind/name."""
        return [f"{kind}/{name}" for verb, kind, name in self.asked if verb in verbs]

    async def get(self, kind: str, namespace: str, name: str, *, subresource: str = "") -> Json | None:
        self._note("get", kind, name)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def list(self, kind: str, namespace: str | None, **selectors: str) -> Listing:
        self._note("list", kind, next(iter(selectors.values()), ""))
        items = [
            copy.deepcopy(body)
            for (item_kind, place, _), body in self.objects.items()
            if item_kind == kind and namespace in (place, None)
        ]
        return Listing(items, self.version)

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        self._note("rehearse" if dry_run else "create", body["kind"], body["metadata"].get("name", ""))
        if dry_run:
            return copy.deepcopy(body)
        if self._key(body) in self.objects:
            raise KubeError(409, f"{body['metadata']['name']} already exists", "AlreadyExists")
        return self.keep(body)

    async def apply(self, body: Json, *, subresource: str = "") -> Json:
        self._note("status" if subresource else "apply", body["kind"], body["metadata"]["name"])
        current = self.objects.get(self._key(body))
        expected = {name: body["metadata"].get(name) for name in ("uid", "resourceVersion")}
        if current is None and (subresource or any(expected.values())):
            raise KubeError(404, "not found", "NotFound")
        if current and any(
            value not in (None, current["metadata"][name]) for name, value in expected.items()
        ):
            raise KubeError(409, "the object has been modified", "Conflict")
        if current is None:
            return self.keep(body)
        if subresource:
            return self.keep({**current, subresource: body[subresource]})
        updated = self.keep({**current, **body, "metadata": {**current["metadata"], **body["metadata"]}})
        if "deletionTimestamp" in updated["metadata"] and not updated["metadata"].get("finalizers"):
            del self.objects[self._key(updated)]
        return updated

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, version: str = "", *, foreground: bool = False
    ) -> None:
        self._note("delete", kind, name)
        current = self.objects.get((kind, namespace, name))
        if (
            current
            and current["metadata"]["uid"] == uid
            and version in ("", current["metadata"]["resourceVersion"])
        ):
            del self.objects[kind, namespace, name]
