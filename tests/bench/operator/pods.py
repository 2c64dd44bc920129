"""Pods as a kubelet would report them, written through the API."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from bench.operator.api import Client, Json

_THREADS = 4


def run_pods(client: Client, pods: Iterable[Json]) -> None:
    """Report pods as running and ready."""
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda pod: _write_status(client, pod, running_status(pod)), pods))


def fail_pod(client: Client, pod: Json) -> None:
    """Report that the container of a pod ended with exit code 1, and its pod with it."""
    _write_status(client, pod, failed_status(pod, datetime.now(UTC)))


def running_status(pod: Json) -> Json:
    """The status of a pod that is running and ready."""
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{**_container(pod), "ready": True, "state": {"running": {}}}],
    }


def failed_status(pod: Json, now: datetime) -> Json:
    """The status of a pod whose container ended with exit code 1."""
    end = {"exitCode": 1, "reason": "Error", "finishedAt": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{**_container(pod), "ready": False, "state": {"terminated": end}}],
    }


def _container(pod: Json) -> Json:
    container = pod["spec"]["containers"][0]
    return {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}


def _write_status(client: Client, pod: Json, status: Json) -> None:
    meta = pod["metadata"]
    client.merge(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status", {"status": status})
