"""The audit log of a cluster's API server: the requests of ServiceAccounts outside kube-system.

https://kubernetes.io/docs/tasks/debug/debug-cluster/audit/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class Right(NamedTuple):
    """A verb on a resource, as in a rule of a Role. `resource`: with its subresource, such as jobs/status."""

    group: str
    resource: str
    verb: str


class Request(NamedTuple):
    """A request to the API server, and whether its user had the right to it."""

    user: str
    right: Right
    is_permitted: bool


def build_flags(directory: Path, log: Path) -> dict[str, str]:
    """Return the flags of a kube-apiserver that writes the log. `directory`: gets the policy."""
    directory.mkdir(parents=True, exist_ok=True)
    policy = directory / "audit-policy.yaml"
    policy.write_text(yaml.safe_dump(_POLICY), encoding="utf-8")
    return {"audit-policy-file": str(policy), "audit-log-path": str(log)}


def read_requests(log: Path) -> Iterator[Request]:
    """Yield the requests in a log that are about resources."""
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            # NB: the API server may be writing the last line.
            event = json.loads(line) if line.endswith("\n") else {}
            if "objectRef" in event:
                yield _read_request(event)


def _read_request(event: dict[str, Any]) -> Request:
    target = event["objectRef"]
    resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
    return Request(
        user=event["user"]["username"],
        right=Right(target.get("apiGroup", ""), resource, event["verb"]),
        is_permitted=event["annotations"].get("authorization.k8s.io/decision") == "allow",
    )
