"""Checks pod templates of tenants: with `pods: Scheduling`, what they may set is listed here, and anything else is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_crds.base import Json
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.quantity import UNITS
from finetune_operator.patterns import matches
from finetune_operator.template_merge import items
from finetune_operator.tenancy.model import Tenant

# Where pods run, and what they need there. NB: a label makes a pod an endpoint of each Service that selects it, and an annotation can
# configure admission webhooks and network plugins, so only those of autoscalers and queues are here.
_METADATA_PREFIXES = {
    "annotations": ("cluster-autoscaler.kubernetes.io/", "karpenter.sh/", "kueue.x-k8s.io/"),
    "labels": ("kueue.x-k8s.io/",),
}
_POD_FIELDS = frozenset(
    {
        "affinity",
        "containers",
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "resources",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    }
)
_CONTAINER_FIELDS = frozenset({"env", "envFrom", "name", "resources", "volumeMounts"})
# Objects of the namespace, and what ends with the pod. NB: not `projected`, which can have a token of the pod's ServiceAccount.
_VOLUME_KINDS = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
)
_ACCELERATOR = re.compile(r"gpu|/mig-|/tpu|gaudi|neuron|/npu|dcu")
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(
    r"[+-]?([0-9]{1,18}(?:\.[0-9]{0,18})?(?:[eE][+-]?[0-9]{1,3})?)(m|k|M|G|T|Ki|Mi|Gi|Ti|)"
)
_FACTORS = {**UNITS, "m": 1e-3}
_TOO_MANY = 10**9
# Both names of the field that Kubernetes accepts.
_ACCOUNT_FIELDS = ("serviceAccountName", "serviceAccount")


@dataclass(frozen=True)
class Breach:
    """A use that the tenancy does not permit.

    Attributes:
        what: the field of the spec, with its value.
        rule: the field of the tenant that would permit it.
    """

    what: str
    rule: str


def find_template_breaches(
    template: Json | None, field: str, tenant: Tenant, *, shared: Json | None = None
) -> Iterator[Breach]:
    """Yield what a pod template sets without permission.

    Args:
        template: a part of a PodTemplateSpec. A user writes it, and the API server has not validated it.
        field: the path of the template in the spec.
        shared: the template of all roles, whose volumes a template can mount too.
    """
    spec = _object((template or {}).get("spec"))
    for name in _ACCOUNT_FIELDS:
        if name in spec:
            yield from find_account_breaches(spec[name], f"{field}.spec.{name}", tenant)
    if tenant.pods == "Any":
        return
    for unknown_field in sorted({*(template or {})} - {"metadata", "spec"}):
        yield Breach(f"{field}.{unknown_field}", "pods")
    yield from _find_metadata_breaches((template or {}).get("metadata"), f"{field}.metadata")
    yield from _find_pod_breaches((template or {}).get("spec"), f"{field}.spec", tenant)
    own_volumes = {item.get("name") for each in (template, shared) for item in items(each, "volumes")}
    for container in items(template, "containers"):
        for mount in _objects(container.get("volumeMounts") or []):
            if mount.get("name") not in own_volumes:
                # NB: a mount replaces one of the chart at the same path, which may be read-only.
                yield Breach(f"{field}.spec.containers volumeMounts of volume {mount.get('name')}", "pods")


def find_account_breaches(account: object, field: str, tenant: Tenant) -> Iterator[Breach]:
    """Yield a breach if a tenant may not use a ServiceAccount; None is no account."""
    if account is not None and not matches(str(account), tenant.service_accounts):
        yield Breach(f"{field} {account}", "serviceAccounts")


def count_devices(template: Json | None, resource: str = "") -> int:
    """Return the GPUs that the containers of a pod template request, whole or in parts (MIG).

    Args:
        resource: another resource that counts, such as habana.ai/gaudi.
    """
    limits = [
        kinds.get(kind)
        for container in items(template, "containers")
        if isinstance(kinds := container.get("resources"), dict)
        for kind in ("limits", "requests")
    ]
    amounts: dict[str, int] = {}
    for by_name in limits:
        for name, amount in _object(by_name).items():
            if name == resource or _ACCELERATOR.search(name):
                # A limit and a request are for the same devices.
                amounts[name] = max(amounts.get(name, 0), _read_quantity(amount))
    return sum(amounts.values())


def _read_quantity(amount: object) -> int:
    """Return a number of devices, rounded up. What is no quantity counts as more than any limit: it must not count as nothing."""
    match = _QUANTITY.fullmatch(str(amount))
    if match is None:
        return _TOO_MANY
    number, suffix = match.groups()
    value = float(number) * _FACTORS[suffix]
    return math.ceil(value) if value < _TOO_MANY else _TOO_MANY


def _find_metadata_breaches(metadata: object, field: str) -> Iterator[Breach]:
    if metadata is not None and not isinstance(metadata, dict):
        yield Breach(field, "pods")
    for name, value in _object(metadata).items():
        prefixes = _METADATA_PREFIXES.get(name)
        if prefixes is None or not isinstance(value, dict):
            yield Breach(f"{field}.{name}", "pods")
            continue
        for key in sorted(map(str, value)):
            if not key.startswith(prefixes):
                yield Breach(f"{field}.{name} {key}", "pods")


def _find_pod_breaches(spec: object, field: str, tenant: Tenant) -> Iterator[Breach]:
    if spec is not None and not isinstance(spec, dict):
        yield Breach(field, "pods")
    for name, value in _object(spec).items():
        if name in _ACCOUNT_FIELDS:
            # Checked with the ServiceAccounts.
            continue
        if name not in _POD_FIELDS:
            yield Breach(f"{field}.{name}", "pods")
        elif name == "priorityClassName" and not matches(str(value), tenant.priority_classes):
            yield Breach(f"{field}.{name} {value}", "priorityClasses")
        elif name == "containers":
            yield from _find_container_breaches(value, f"{field}.{name}")
        elif name == "volumes":
            yield from _find_volume_breaches(value, f"{field}.{name}")


def _find_container_breaches(containers: object, field: str) -> Iterator[Breach]:
    for container in _objects(containers):
        name = container.get("name")
        if name != MAIN_CONTAINER:
            yield Breach(f"{field} {name}", "pods")
            continue
        for unknown_field in sorted({*container} - _CONTAINER_FIELDS):
            yield Breach(f"{field} {name} {unknown_field}", "pods")


def _find_volume_breaches(volumes: object, field: str) -> Iterator[Breach]:
    for volume in _objects(volumes):
        for kind in sorted({*volume} - _VOLUME_KINDS - {"name"}):
            yield Breach(f"{field} {volume.get('name')} {kind}", "pods")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    """The items of a list as objects. An item of another type becomes an object without fields, which is refused or harmless."""
    return [_object(item) for item in value] if isinstance(value, list) else [{}]
