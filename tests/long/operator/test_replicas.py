"""The leading one of two replicas is killed, stopped, paused or cut off, again and again, while jobs and promotions go on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.settings import Settings
from fixtures.operator_processes.api_link import link_api
from fixtures.operator_processes.link import Link, Outages, outages
from fixtures.operator_processes.replicas import Replicas
from long.amounts import SEED, TAKEOVERS
from long.operator.work import Work
from support.mlflow_server import Mlflow
from support.process import Process

MOST_IN_A_ROUND = 8
LEASE_SECONDS = Settings().lease_seconds
API_OUTAGE_SECONDS = 60


@dataclass
class Member:
    """A replica, and its link to the API server."""

    process: Process
    link: Link


def test_replicas_that_take_over_from_each_other_lose_and_repeat_nothing(
    kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    print(f"takeovers at random moments with SEED = {SEED}")
    dice = random.Random(SEED)  # noqa: S311 - the seed makes a failure repeatable
    work = Work(kubeconfig, mlflow_server, namespace, dice)
    with ExitStack() as stack:
        network = stack.enter_context(outages())
        replicas = Replicas(work.world, kubeconfig, tmp_path, stack, LEASE_SECONDS)
        members = {name: _start(name, replicas, network) for name in ("first", "second")}
        work.begin()
        count = 0
        while count < TAKEOVERS:
            with work.one_round() as courses:
                for _ in range(min(MOST_IN_A_ROUND, TAKEOVERS - count)):
                    leader = members[replicas.wait_any_leader()]
                    dice.choice(ENDS)(leader, network)
                    count += 1
                    work.check_no_two_gangs()
                    for member in members.values():
                        # As the kubelet restarts a container.
                        member.process.start()
                    if not wait(courses, timeout=dice.uniform(0, 10)).not_done:
                        break
                work.check([course.result() for course in courses])
            work.clear()
            print(f"round {work.round}: {count} takeovers")
        _check_outage_of_all(work, members, network)
    for name in members:
        assert "Traceback" not in (tmp_path / f"{name}.log").read_text(encoding="utf-8")


def _start(name: str, replicas: Replicas, network: Outages) -> Member:
    link, kubeconfig = link_api(network, replicas.kubeconfig, replicas.folder / f"{name}.kubeconfig")
    return Member(replicas.start(name, kubeconfig=kubeconfig), link)


def _kill(leader: Member, _network: Outages) -> None:
    leader.process.kill()


def _stop(leader: Member, _network: Outages) -> None:
    leader.process.stop()


def _pause(leader: Member, _network: Outages) -> None:
    assert leader.process.started is not None
    leader.process.started.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * LEASE_SECONDS)
    leader.process.started.send_signal(signal.SIGCONT)
    leader.process.started.wait(30)


def _cut_off(leader: Member, network: Outages) -> None:
    assert leader.process.started is not None
    with network.outage(leader.link, "freezes"):
        leader.process.started.wait(2 * LEASE_SECONDS + 10)


ENDS: tuple[Callable[[Member, Outages], None], ...] = (_kill, _stop, _pause, _cut_off)


def _check_outage_of_all(work: Work, members: dict[str, Member], network: Outages) -> None:
    """The API server is away from all replicas for a minute, in which a round of work begins."""
    with work.one_round() as courses:
        with ExitStack() as away:
            for member in members.values():
                away.enter_context(network.outage(member.link, "refuses"))
            deadline = time.monotonic() + API_OUTAGE_SECONDS
            while time.monotonic() < deadline:
                for member in members.values():
                    member.process.start()
                time.sleep(1)
        for member in members.values():
            member.process.start()
        work.check([course.result() for course in courses])
