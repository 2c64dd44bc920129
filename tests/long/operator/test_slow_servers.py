"""MLflow and then the API server send their answers a byte at a time, for minutes, while many jobs train."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil

from fixtures.operator_processes.api_link import link_api
from fixtures.operator_processes.jobs import error, splits_given
from fixtures.operator_processes.link import outages
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.outcomes import Outcome, find_outcome
from fixtures.operator_processes.world import World
from long.amounts import DRIP_SECONDS
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import operator_process
from support.process import Process, running

JOBS = 40
RESTARTED_SECONDS = 15
GROWTH_MIB = 24
"""How much the operator's memory may grow. It grew from 99 to 102 MiB in two minutes of drips (November 27, 2026)."""
ONE_NODE = {"nodes": 1, "processesPerNode": 2}


@dataclass
class Memory:
    """The memory of a process, which a thread reads once a second while the process runs, in MiB."""

    process: Process
    samples: list[float] = field(default_factory=list)

    def read(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        ended = Event()

        def sample() -> None:
            while not ended.wait(1):
                with suppress(psutil.NoSuchProcess):
                    self.samples += [self.read()] if self.process.alive() else []

        thread = Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def restart(world: World, name: str, attempt: int) -> float:
    """Play an attempt that fails, and the start of the next one; the seconds between both."""
    world.end_pods(f"{name}-train-{attempt}", [1], [error("Boom", "!")])
    began = time.monotonic()
    world.run_pods(f"{name}-train-{attempt + 1}", 1)
    return time.monotonic() - began


def test_servers_that_drip_cost_no_memory_and_delay_no_job_of_another_server(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    world, other = (World(api, mlflow_server, name) for name in (namespace, new_namespace(api)))
    jobs = [f"tune-{number}" for number in range(JOBS)]
    with outages() as network:
        link, linked_kubeconfig = link_api(network, kubeconfig, tmp_path / "kubeconfig")
        mlflow = network.link(mlflow_server.port)
        settings = {
            "FINETUNE_NAMESPACES": f"{namespace},{other.namespace}",
            "FINETUNE_TRACKING_URI": f"http://127.0.0.1:{mlflow.port}",
        }
        operator = operator_process(linked_kubeconfig, tmp_path / "operator.log", settings)
        with running(operator):
            for name in jobs:
                world.submit(splits_given(name, distributed=ONE_NODE))
            for name in jobs:
                world.run_pods(f"{name}-train-1", 1)
                world.wait_phase(name, "Training")
            limits = {"maxRestarts": 1000}
            other.submit(
                splits_given(
                    "other", distributed=ONE_NODE, tracking={"uri": other.mlflow.uri}, runPolicy=limits
                )
            )
            other.run_pods("other-train-1", 1)
            memory = Memory(operator)
            before_mib, attempt, delays = memory.read(), 1, []
            with memory.sampling():
                with network.outage(mlflow, "drips"):
                    world.submit(splits_given("late", distributed=ONE_NODE))
                    deadline = time.monotonic() + DRIP_SECONDS
                    while time.monotonic() < deadline:
                        delays.append(restart(other, "other", attempt))
                        attempt += 1
                        time.sleep(5)
                    assert world.condition("late", "Tracked")["reason"] == "MlflowUnreachable"
                with network.outage(link, "drips"):
                    world.submit(splits_given("later", distributed=ONE_NODE))
                    deadline = time.monotonic() + DRIP_SECONDS
                    while time.monotonic() < deadline:
                        # As the kubelet restarts a container: the operator ends when it cannot renew its Lease.
                        operator.start()
                        time.sleep(1)
                operator.start()
                for name in ("late", "later"):
                    world.run_pods(f"{name}-train-1", 1)
                    world.wait_phase(name, "Training")
            print(f"restarts: {delays}; memory in MiB: {before_mib}, then {memory.samples}")
            assert max(delays) < RESTARTED_SECONDS
            assert max(memory.samples) < before_mib + GROWTH_MIB
            expected = {
                name: Outcome.of(name, "Training", attempts=1, restarts=0)
                for name in (*jobs, "late", "later")
            }
            assert {name: find_outcome(world, name) for name in expected} == expected
            other.wait_phase("other", "Training")
            assert find_outcome(other, "other") == Outcome.of(
                "other", "Training", attempts=attempt, restarts=attempt - 1
            )
    assert "Traceback" not in operator.log.read_text(encoding="utf-8")
