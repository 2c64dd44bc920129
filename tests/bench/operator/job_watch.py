"""When Jobs appear and when they fail, from a watch of the API server."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from bench.operator.api import Client, Json


@dataclass
class JobWatch:
    """The moments, on the monotonic clock, at which Jobs of a namespace were created and failed, by their names."""

    client: Client
    namespace: str
    created: dict[str, float] = field(default_factory=dict)
    failed: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to watch; the watch ends with the process."""
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        version = self.client.call("GET", f"{path}?limit=1")["metadata"]["resourceVersion"]
        threading.Thread(target=self._watch, args=(path, version), daemon=True).start()

    def _watch(self, path: str, version: str) -> None:
        # NB: the servers end before this thread does.
        with suppress(OSError):
            for event in self.client.watch(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=7200"):
                self.record(event, time.monotonic())

    def record(self, event: Json, now: float) -> None:
        """Record what an event says."""
        job = event["object"]
        name = job["metadata"].get("name", "")
        if event["type"] == "ADDED":
            self.created.setdefault(name, now)
        conditions = (job.get("status") or {}).get("conditions") or []
        if any(item["type"] == "Failed" and item["status"] == "True" for item in conditions):
            self.failed.setdefault(name, now)
