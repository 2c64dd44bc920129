"""A value that belongs in the specs of pods alone, and where else it could be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.api import Api

Json = dict[str, Any]

CANARY = "canary-3f9c71d2"
VARIABLES: list[Json] = [{"name": "CANARY", "value": CANARY}]
"""Variables with the value."""
_KINDS = (
    "FineTuneJob",
    "ModelPromotion",
    "FineTuneSchedule",
    "Job",
    "Pod",
    "Service",
    "ConfigMap",
    "NetworkPolicy",
    "Event",
    "Lease",
)
_WITH_PODS = ("FineTuneJob", "Job", "Pod")
# A copy of the spec, which `kubectl apply` makes.
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def read_objects(api: Api, namespace: str) -> dict[str, str]:
    """Read every object of a namespace as JSON, by kind and name; of a FineTuneJob, a Job and a pod all but its spec."""
    return {
        f"{kind}/{item['metadata']['name']}": json.dumps(_without_spec(item) if kind in _WITH_PODS else item)
        for kind in _KINDS
        for item in api.list(kind, namespace)
    }


def _without_spec(item: Json) -> Json:
    meta = item["metadata"]
    annotations = {name: text for name, text in (meta.get("annotations") or {}).items() if name != _APPLIED}
    return {**item, "spec": None, "metadata": {**meta, "annotations": annotations}}


def read_files(folder: Path) -> dict[str, str]:
    """Read every file below a folder, by its path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file): file.read_bytes().decode(errors="replace") for file in files}


def select_leaks(texts: dict[str, str]) -> list[str]:
    """Select the names of the texts that have the value."""
    return [name for name, text in texts.items() if CANARY in text]
