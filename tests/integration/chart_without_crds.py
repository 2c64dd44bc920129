"""The chart without its CRDs, which take seconds to read."""

from __future__ import annotations

from typing import Any

import yaml

from integration import chart

Json = dict[str, Any]


def objects(*values: str) -> dict[tuple[str, str], Json]:
    """The manifests by kind and name."""
    return chart.objects("crds.enabled=false", *values)


def environment(*values: str) -> dict[str, str]:
    """The environment of the operator's container."""
    return chart.environment("crds.enabled=false", *values)


def operator(*values: str) -> Json:
    """The operator's Deployment."""
    return objects(*values)["Deployment", "finetune-operator"]


def pod(*values: str, name: str = "finetune-operator") -> Json:
    """The pod of a Deployment."""
    pod_spec: Json = objects(*values)["Deployment", name]["spec"]["template"]["spec"]
    return pod_spec


def defaults(*values: str) -> Json:
    """What the operator reads as defaults of jobs."""
    config_map = objects(*values)["ConfigMap", "finetune-operator-defaults"]
    return dict(yaml.safe_load(config_map["data"]["defaults.yaml"]))
