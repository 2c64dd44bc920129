"""Who wrote what: to the API server, from its audit log, and to MLflow, from its access log."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: None
    users: ["system:apiserver"]
  - level: Metadata
    verbs: [create, update, patch, delete, deletecollection]
  - level: None
"""
# The benchmark's own client, which makes the promotions.
_OWN_AGENT = "Python-urllib"
_ACCESS = re.compile(r'"(?P<method>[A-Z]+) (?P<target>\S+) HTTP/[0-9.]+" (?P<code>\d{3})')
# MLflow is also asked by POST.
_QUESTIONS = ("/search", "/get-latest-versions")


@dataclass
class Requests:
    """What was asked of both servers in some time.

    Attributes:
        api_writes: to the API server by `verb resource`.
        mlflow_writes: to MLflow by `method path`.
        mlflow_reads: how many of the others.
        models: registered models that MLflow was asked about.
    """

    api_writes: Counter[str] = field(default_factory=Counter)
    mlflow_writes: Counter[str] = field(default_factory=Counter)
    mlflow_reads: int = 0
    models: set[str] = field(default_factory=set)


class Tail:
    """The lines that a log gets from now on."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.position = log.stat().st_size if log.exists() else 0

    def lines(self) -> list[str]:
        """Whole lines that came since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.position)
            content = file.read()
        full_lines = content[: content.rfind(b"\n") + 1]
        self.position += len(full_lines)
        return full_lines.decode(errors="replace").splitlines()


# How `support.operator_process` names it.
_ELECTION_LEASE = "operator-"


def count(audit: list[str], access: list[str], earlier: Requests | None = None) -> Requests:
    """What the lines of the audit log and of MLflow's access log say, added to what is known."""
    requests = earlier or Requests()
    for line in audit:
        _count_audit(json.loads(line), requests)
    for line in access:
        match = _ACCESS.search(line)
        if match:
            _count_access(match["method"], match["target"], requests)
    return requests


def _count_audit(event: dict[str, object], requests: Requests) -> None:
    if str(event.get("userAgent", "")).startswith(_OWN_AGENT):
        return
    target = event.get("objectRef")
    where = target if isinstance(target, dict) else {}
    # NB: the Lease of the replica that leads is renewed all the time, whatever the promotions need.
    if where.get("resource") == "leases" and str(where.get("name", "")).startswith(_ELECTION_LEASE):
        return
    parts = [str(where[name]) for name in ("resource", "subresource") if where.get(name)]
    requests.api_writes[f"{event['verb']} {'/'.join(parts)}"] += 1


def _count_access(method: str, target: str, requests: Requests) -> None:
    address = urlsplit(target)
    if address.path == "/health":
        return
    if method == "GET" or address.path.endswith(_QUESTIONS):
        requests.mlflow_reads += 1
        if address.path.endswith("/registered-models/get"):
            requests.models.update(parse_qs(address.query).get("name", []))
    else:
        requests.mlflow_writes[f"{method} {address.path}"] += 1
