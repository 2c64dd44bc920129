"""Many jobs at once: how long it takes until all their pods exist, and what that costs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from bench.operator.contenders import PODS, Contender
from bench.operator.figures import Fleet
from bench.operator.plane import Plane
from bench.operator.requests import count_access, count_audit
from bench.operator.usage import total_cpu_seconds
from bench.promotions.writes import Tail
from support.mlflow_server import Mlflow
from support.waiting import wait_for

_THREADS = 4
# How many jobs a second are slow enough to give up on.
_LOWEST_SPEED = 0.5
_SECONDS_AT_LEAST = 120.0
# Events and the last passes come after the last status.
_SECONDS_TO_SETTLE = 3.0


def start_fleet(plane: Plane, contender: Contender, jobs: int, mlflow: Mlflow) -> tuple[str, Fleet]:
    """Create jobs in a new namespace, and wait for their pods and statuses; the namespace and the figures."""
    namespace, process = plane.create_namespace(), contender.process
    expected = _expect_children(plane, contender, namespace, jobs)
    seconds = max(_SECONDS_AT_LEAST, jobs / _LOWEST_SPEED)
    assert process.pid is not None
    audit, access = plane.tail(), Tail(mlflow.log)
    servers = ([process.pid], plane.pids(), [mlflow.pid])
    cpu_before = [total_cpu_seconds(pids) for pids in servers]
    began = time.monotonic()
    path = contender.path(namespace)
    with ThreadPoolExecutor(_THREADS) as threads:
        manifests = (contender.manifest(f"job-{number:04d}") for number in range(jobs))
        list(threads.map(lambda body: plane.client.call("POST", path, body), manifests))
    for collection, number in expected.items():
        wait_for(
            f"{number} objects in {collection}",
            lambda: plane.client.count(collection) >= number,  # noqa: B023 - called in this pass of the loop
            seconds,
            process,
        )
    pods_seconds = time.monotonic() - began
    wait_for(
        "the statuses",
        lambda: all(contender.is_reported(job) for job in plane.client.items(path)),
        seconds,
        process,
        pause=0.25,
    )
    status_seconds = time.monotonic() - began
    time.sleep(_SECONDS_TO_SETTLE)
    controller_cpu, plane_cpu, mlflow_cpu = (
        total_cpu_seconds(pids) - before for pids, before in zip(servers, cpu_before, strict=True)
    )
    fleet = Fleet(
        jobs,
        pods_seconds,
        status_seconds,
        controller_cpu,
        plane_cpu,
        mlflow_cpu,
        count_audit(audit.lines()),
        count_access(access.lines()),
    )
    return namespace, fleet


def _expect_children(plane: Plane, contender: Contender, namespace: str, jobs: int) -> dict[str, int]:
    """How many objects there are in a namespace when all children of its jobs exist, by collection."""
    children = {"api/v1/pods": PODS, **contender.companions}
    collections = {
        f"/{api}/namespaces/{namespace}/{plural}": number
        for (api, _, plural), number in ((path.rpartition("/"), number) for path, number in children.items())
    }
    return {path: plane.client.count(path) + number * jobs for path, number in collections.items()}
