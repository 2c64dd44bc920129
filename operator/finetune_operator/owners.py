"""Who controls an object.

A batch Job controls its pods, a FineTuneSchedule or a FineTuneJob with a sweep its FineTuneJobs, and a FineTuneJob or a ModelPromotion every
other child. An object belongs to its owner by its controller ownerReference. Labels only select candidates, since any user can write them.
"""

from __future__ import annotations

from typing import NamedTuple

from finetune_crds.base import API_VERSION, GROUP, Json

_KINDS = ("FineTuneJob", "ModelPromotion")


class Owner(NamedTuple):
    """The controller of an object, see the module."""

    namespace: str
    uid: str


def find_owner(kind: str, body: Json) -> Owner | None:
    """The Job that controls an object of kind Pod, or the resource that controls an object of any other kind; None without either."""
    return find_owner_of_kind("batch", ("Job",), body) if kind == "Pod" else find_resource(body)


def find_resource(body: Json) -> Owner | None:
    """The FineTuneJob or ModelPromotion that controls an object; None without one."""
    return find_owner_of_kind(GROUP, _KINDS, body)


def find_schedule(body: Json) -> Owner | None:
    """The FineTuneSchedule that controls a FineTuneJob; None without one."""
    return find_owner_of_kind(GROUP, ("FineTuneSchedule",), body)


def find_finetunejob(body: Json) -> Owner | None:
    """The FineTuneJob that controls an object: if this is a FineTuneJob too, it is a trial of a sweep; None without one."""
    return find_owner_of_kind(GROUP, ("FineTuneJob",), body)


def find_creator(body: Json) -> Owner | None:
    """The FineTuneSchedule or the FineTuneJob that controls a FineTuneJob; None without one."""
    return find_schedule(body) or find_finetunejob(body)


def find_owner_of_kind(group: str, kinds: tuple[str, ...], body: Json) -> Owner | None:
    """The controller of an object; None unless it has this API group and one of these kinds."""
    reference = find_controller(body)
    if reference is None:
        return None
    owner_group, _, _version = str(reference["apiVersion"]).partition("/")
    if owner_group != group or reference["kind"] not in kinds:
        return None
    # NB: an owner is in the namespace of its dependent; Kubernetes treats any other owner as absent.
    return Owner(body["metadata"]["namespace"], reference["uid"])


def find_controller(body: Json) -> Json | None:
    """The ownerReference of an object's controller; None without one. There is at most one."""
    references = body["metadata"].get("ownerReferences") or []
    return next((dict(item) for item in references if item.get("controller") is True), None)


def build_owner_reference(kind: str, name: str, uid: str) -> Json:
    """The ownerReference to a resource of this API that controls an object: the object is deleted with it, and before it in the foreground."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
