"""The requests of a contender, from the audit log of the API server and the access log of MLflow."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from bench.operator.api import WRITER_ADDRESS

_ACCESS = re.compile(
    r'(?P<address>[\d.]+):\d+ - "(?P<method>[A-Z]+) (?P<target>\S+) HTTP/[0-9.]+" (?P<code>\d{3})'
)
# MLflow is also asked by POST.
_QUESTIONS = ("/search", "/get-latest-versions")
_WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


def audit_policy(user: str) -> str:
    """An audit policy that logs the requests of one user, each once, and nothing else."""
    return f"""\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    users: ["{user}"]
  - level: None
"""


def count_audit(lines: Iterable[str]) -> Counter[str]:
    """Requests to the API server by verb and resource; a dry run is a verb of its own."""
    requests: Counter[str] = Counter()
    for line in lines:
        event = json.loads(line)
        # NB: a watch has two entries, one when it begins and one when it ends.
        if event["verb"] == "watch" and event["stage"] != "ResponseStarted":
            continue
        verb = f"{event['verb']} (dry run)" if "dryRun=" in event["requestURI"] else event["verb"]
        requests[f"{verb} {_resource(event)}"] += 1
    return requests


def count_access(lines: Iterable[str]) -> Counter[str]:
    """Requests to MLflow by method and path, without those of the benchmark."""
    requests: Counter[str] = Counter()
    for line in lines:
        match = _ACCESS.search(line)
        if match and match["address"] != WRITER_ADDRESS:
            path = match["target"].partition("?")[0].rpartition("/mlflow/")[2]
            if path != "/health":
                requests[f"{match['method']} {path}"] += 1
    return requests


def list_writes(requests: Counter[str]) -> Counter[str]:
    """The requests to the API server that change something; a dry run changes nothing, and a Lease is no object of a job."""
    return Counter(
        {
            name: count
            for name, count in requests.items()
            if name.partition(" ")[0] in _WRITES and "(dry run)" not in name and not name.endswith(" leases")
        }
    )


def list_mlflow_writes(requests: Counter[str]) -> Counter[str]:
    """The requests to MLflow that change something."""
    return Counter(
        {
            name: count
            for name, count in requests.items()
            if not name.startswith("GET ") and not name.endswith(_QUESTIONS)
        }
    )


def _resource(event: dict[str, object]) -> str:
    target = event.get("objectRef")
    if not isinstance(target, dict) or not target.get("resource"):
        return str(event["requestURI"]).partition("?")[0]
    return "/".join(str(target[name]) for name in ("resource", "subresource") if target.get(name))
