"""Merge pod templates like a strategic merge patch, and read what they contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from finetune_crds.base import Json

# Lists of a PodSpec whose items are identified by a key (Kubernetes API reference, patchMergeKey).
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
# Lists whose items are merged. In the other lists, items are replaced: a volume has only one source, a variable only one value.
_DEEP = {"containers", "initContainers"}
# Lists that are concatenated.
_JOINED = {"envFrom"}
LOST_WITH_POD = ("emptyDir", "ephemeral")
"""Kinds of volumes that are deleted with their pod."""


def merge(below: Any, above: Any, field: str = "") -> Any:
    """Merge `above` into `below`: maps are merged, lists are merged by the key of their items or joined, and everything else is replaced.

    For example, the containers [{name: main, image: a}] and [{name: main, image: b, args: [c]}, {name: log}] give
    [{name: main, image: b, args: [c]}, {name: log}].

    Users write `above`, and the API server has not validated it: null is treated as absent, and invalid values stay, so that the API
    server rejects them.

    Args:
        field: the name of the field that has both values.
    """
    if above is None:
        return below
    if isinstance(below, dict) and isinstance(above, dict):
        in_both = below.keys() & above.keys()
        return {
            name: merge(below[name], above[name], name) if name in in_both else value
            for name, value in {**below, **above}.items()
        }
    if isinstance(below, list) and isinstance(above, list) and field in _JOINED:
        return [*below, *above]
    if isinstance(below, list) and isinstance(above, list) and field in _KEYS:
        return _merge_keyed(below, above, _KEYS[field], deep=field in _DEEP)
    return above


def _merge_keyed(below: list[Any], above: list[Any], key: str, *, deep: bool) -> list[Any]:
    """Merge lists whose items have a key. An item of `above` is merged into the item of `below` with the same key (`deep`), or replaces it."""
    merged = {_identity(item, key, position): item for position, item in enumerate(below)}
    # The positions continue, so that an item without a key replaces no item of `below`.
    for position, item in enumerate(above, start=len(below)):
        identity = _identity(item, key, position)
        merged[identity] = merge(merged[identity], item) if deep and identity in merged else item
    return list(merged.values())


def _identity(item: Any, key: str, position: int) -> str | int:
    """The key of an item, or its position if it has no key."""
    identity = item.get(key) if isinstance(item, dict) else None
    return identity if isinstance(identity, str) else position


def items(template: Json | None, field: str) -> Iterator[Json]:
    """The objects in a list of a template's spec; none without such a list. The API server has not validated the template."""
    spec = (template or {}).get("spec")
    entries = spec.get(field) if isinstance(spec, dict) else None
    yield from (item for item in (entries if isinstance(entries, list) else []) if isinstance(item, dict))


def containers(template: Json | None, name: str) -> Iterator[Json]:
    """The containers with this name in a template that the API server has not validated."""
    return (item for item in items(template, "containers") if item.get("name") == name)


def mounts(template: Json | None, container: str, *, but: Sequence[str]) -> list[str]:
    """The paths at which a container mounts the template's volumes. Invalid volumes and mounts are left out.

    Args:
        but: kinds of volumes to leave out.
    """
    volumes = [item for item in items(template, "volumes") if not any(kind in item for kind in but)]
    volume_names = {item["name"] for item in volumes if isinstance(item.get("name"), str)}
    lists = [item.get("volumeMounts") for item in containers(template, container)]
    volume_mounts = [
        mount
        for mount_list in lists
        if isinstance(mount_list, list)
        for mount in mount_list
        if isinstance(mount, dict)
    ]
    kept_mounts = [
        mount
        for mount in volume_mounts
        if isinstance(mount.get("name"), str) and mount["name"] in volume_names
    ]
    return [mount["mountPath"] for mount in kept_mounts if isinstance(mount.get("mountPath"), str)]


def is_below(path: str, mount: str) -> bool:
    """Whether a path is the mount path, or below it."""
    folder = mount.rstrip("/")
    return path == folder or path.startswith(f"{folder}/")


def requested_devices(template: Json | None) -> list[str]:
    """The devices that a template's containers request: extended resources, such as GPUs, and resource claims."""
    every_container = [*items(template, "containers"), *items(template, "initContainers")]
    resources = [item["resources"] for item in every_container if isinstance(item.get("resources"), dict)]
    names = [
        name
        for item in resources
        for kind in ("limits", "requests")
        if isinstance(item.get(kind), dict)
        for name in item[kind]
    ]
    # Only the names of extended resources have a domain, such as nvidia.com/gpu.
    extended = dict.fromkeys(name for name in names if "/" in name)
    claims = ["resource claims"] if any(item.get("claims") for item in resources) else []
    return [*extended, *claims]
