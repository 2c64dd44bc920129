"""What the store keeps of an object: the fields that decisions need.

A training pod is 9 KB of JSON and 50 KiB of Python objects, most of them for managedFields and for the variables and mounts of its
containers. The store keeps a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern

from finetune_crds.base import Json
from finetune_operator.settings import Settings

COMPANIONS = ("Service", "ConfigMap", "NetworkPolicy")
"""Kinds of objects that the pods of a Job need besides the Job. Only the metadata of these objects is kept."""

# The manifest that `kubectl apply` sent, as an annotation.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
# The field of a Job's spec that is not kept: the template of its pods, which never changes.
_JOB_TEMPLATE = "template"
_POD_SPEC_FIELDS = ("nodeName", "nodeSelector")
_CONTAINER_FIELDS = ("name", "resources")


def list_companion_kinds(settings: Settings) -> tuple[str, ...]:
    """Those of COMPANIONS that the operator may list and watch."""
    return tuple(kind for kind in COMPANIONS if kind != "NetworkPolicy" or settings.network_policies)


def project(kind: str, body: Json) -> Json:
    """The fields of an object that the store keeps; the object itself is not changed."""
    return _PROJECTIONS.get(kind, _project_resource)(body)


def _project_resource(body: Json) -> Json:
    return _share_keys({**body, "metadata": _project_metadata(body)})


def _project_promotion(body: Json) -> Json:
    """The whole promotion, since its managedFields name who changed it. Without spec.model, the promotion's name is filled in."""
    return {**body, "spec": {"model": body["metadata"]["name"], **(body.get("spec") or {})}}


def _project_companion(body: Json) -> Json:
    return _share_keys({"metadata": _project_metadata(body)})


def _project_job(body: Json) -> Json:
    projection = {"metadata": _project_metadata(body)}
    if "spec" in body:
        spec = body["spec"].items()
        projection["spec"] = {name: value for name, value in spec if name != _JOB_TEMPLATE}
    return _share_keys(_with_status(projection, body))


def _project_pod(body: Json) -> Json:
    projection = {"metadata": _project_metadata(body)}
    spec = body.get("spec")
    if spec:
        containers = [_select(item, _CONTAINER_FIELDS) for item in spec.get("containers") or []]
        projection["spec"] = {**_select(spec, _POD_SPEC_FIELDS), "containers": containers}
    return _share_keys(_with_status(projection, body))


def _with_status(projection: Json, body: Json) -> Json:
    return {**projection, "status": body["status"]} if "status" in body else projection


def _project_metadata(body: Json) -> Json:
    meta = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    entries = meta.get("annotations")
    if entries and _LAST_APPLIED in entries:
        meta["annotations"] = {name: value for name, value in entries.items() if name != _LAST_APPLIED}
    return meta


def _select(values: Json, names: tuple[str, ...]) -> Json:
    return {name: values[name] for name in names if name in values}


def _share_keys(value: Json) -> Json:
    """A copy with interned keys, which take memory only once: json creates new strings for each document."""
    return {intern(name): _share_keys_within(item) for name, item in value.items()}


def _share_keys_within(value: object) -> object:
    if isinstance(value, dict):
        return _share_keys(value)
    if isinstance(value, list):
        return [_share_keys_within(item) for item in value]
    return value


_PROJECTIONS: Mapping[str, Callable[[Json], Json]] = {
    "Job": _project_job,
    "Pod": _project_pod,
    "ModelPromotion": _project_promotion,
    **dict.fromkeys(COMPANIONS, _project_companion),
}
