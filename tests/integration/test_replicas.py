"""Two replicas of the operator as processes on a real API server: kills, pauses, handovers, and an API server that is away."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

from finetune_operator.settings import Settings
from fixtures.operator_processes.api_link import link_api
from fixtures.operator_processes.jobs import splits_given
from fixtures.operator_processes.link import outages
from fixtures.operator_processes.replicas import SHORT_LEASE_SECONDS, Replicas, is_ready
from support.http_server import Answer, NoAnswerError, Request, serving
from support.operator_process import metric
from support.waiting import wait_for


def test_a_killed_leader_is_replaced_within_15_seconds(replicas: Replicas) -> None:
    replicas.lease_seconds = Settings().lease_seconds
    leader, standby = replicas.start("first"), replicas.start("second")
    replicas.world.submit(splits_given("before"))
    replicas.wait_jobs(60, "before-train-1")
    assert [metric(each, "finetune_operator_is_leader") for each in (leader, standby)] == [1, 0]
    assert metric(standby, "finetune_operator_reconcile_seconds_count") == 0
    leader.kill()
    replicas.world.submit(splits_given("after"))
    replicas.wait_jobs(15, "before-train-1", "after-train-1")
    assert metric(standby, "finetune_operator_is_leader") == 1


def test_a_leader_that_is_stopped_hands_over_at_once(replicas: Replicas) -> None:
    replicas.lease_seconds = 60
    leader = replicas.start("first")
    replicas.world.submit(splits_given("before"))
    replicas.wait_jobs(60, "before-train-1")
    standby = replicas.start("second")
    assert leader.started is not None
    leader.started.send_signal(signal.SIGTERM)
    replicas.wait_leader("second", 60 * 0.1 + 4)
    assert leader.started.wait(10) == 0
    replicas.world.submit(splits_given("after"))
    replicas.wait_jobs(60, "before-train-1", "after-train-1")
    # The kubelet restarts the container: the replica has its Lease back at once.
    standby.kill()
    standby.start()
    wait_for("it leads again", lambda: metric(standby, "finetune_operator_is_leader") == 1, 30, standby)


@dataclass
class HeldAnswer:
    """MLflow's answer to the operator, which looks for the experiment of a job before it creates a run: the test holds it back."""

    uri: str = ""
    asked: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    writes: list[str] = field(default_factory=list)


@contextmanager
def hold_answer(target: str) -> Iterator[HeldAnswer]:
    """A relay to MLflow that holds the answer until the test releases it."""
    held = HeldAnswer()

    def respond(request: Request) -> Answer:
        path = request.target.partition("?")[0].rpartition("/mlflow/")[2]
        if request.method != "GET":
            held.writes.append(f"{request.method} {path}")
            raise NoAnswerError
        answer = requests.get(target + request.target, timeout=10)
        if path == "experiments/get-by-name":
            held.asked.set()
            held.released.wait(60)
        return Answer(answer.status_code, answer.content)

    with serving(respond) as held.uri:
        try:
            yield held
        finally:
            held.released.set()


def test_a_paused_leader_that_continues_after_its_lease_writes_nothing(
    replicas: Replicas, tmp_path: Path
) -> None:
    world = replicas.world
    held = replicas.stack.enter_context(hold_answer(world.mlflow.uri))
    network = replicas.stack.enter_context(outages())
    link, kubeconfig = link_api(network, replicas.kubeconfig, tmp_path / "kubeconfig")
    paused = replicas.start("paused", kubeconfig=kubeconfig, tracking_uri=held.uri)
    other = replicas.start("other")
    job = world.submit(splits_given())
    assert held.asked.wait(60)
    assert paused.started is not None
    paused.started.send_signal(signal.SIGSTOP)
    # The answer is there when the process continues. Its next step is to create the experiment and the run.
    held.released.set()
    before = [*link.writes], [*held.writes]
    replicas.wait_jobs(9, "tune-train-1")
    paused.started.send_signal(signal.SIGCONT)
    assert paused.started.wait(20) == 1
    assert ([*link.writes], [*held.writes]) == before
    # NB: what refused the next request to MLflow is not logged: it is sent outside of passes, and the process ends.
    assert "this replica lost Lease default/" in paused.log.read_text(encoding="utf-8")
    world.settle(other)
    assert len(world.mlflow.runs_of(job["metadata"]["uid"])) == 1
    replicas.wait_jobs(1, "tune-train-1")


def test_a_leader_steps_down_while_the_api_server_is_away_and_catches_up(
    replicas: Replicas, tmp_path: Path
) -> None:
    network = replicas.stack.enter_context(outages())
    link, kubeconfig = link_api(network, replicas.kubeconfig, tmp_path / "kubeconfig")
    operator = replicas.start("operator", kubeconfig=kubeconfig)
    replicas.world.submit(splits_given("before"))
    replicas.wait_jobs(60, "before-train-1")
    with network.outage(link, "refuses"):
        started = time.monotonic()
        assert operator.started is not None
        assert operator.started.wait(20) == 1
        assert time.monotonic() - started < 2 * SHORT_LEASE_SECONDS + 4
        # The kubelet restarts the container, which waits for the API server.
        operator.start()
        replicas.world.submit(splits_given("after"))
    replicas.wait_jobs(60, "before-train-1", "after-train-1")
    wait_for("it is ready", lambda: is_ready(operator), 60, operator)
