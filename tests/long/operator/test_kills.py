"""The operator's process is killed 500 times, at random moments, while jobs and promotions go on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from long.amounts import KILLS, SEED
from long.operator.work import Course, Work
from support.mlflow_server import Mlflow
from support.operator_process import metric, operator_process, watching
from support.process import Process, running
from support.waiting import PATIENCE, wait_for

# A round of work is let come to its end after so many kills: a job may need more lives than it gets otherwise.
MOST_IN_A_ROUND = 25


def test_an_operator_that_is_killed_loses_and_repeats_nothing(
    kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    print(f"kills at random moments with SEED = {SEED}")
    dice = random.Random(SEED)  # noqa: S311 - the seed makes a failure repeatable
    environment = watching(namespace, mlflow_server.uri, resync_seconds=1)
    operator = operator_process(kubeconfig, tmp_path / "operator.log", environment)
    work = Work(kubeconfig, mlflow_server, namespace, dice)
    kills = 0
    with running(operator):
        work.begin()
        while kills < KILLS:
            with work.one_round() as courses:
                kills += kill(operator, courses, work, dice, most=min(MOST_IN_A_ROUND, KILLS - kills))
                operator.start()
                work.check([course.result() for course in courses])
            settled = work.world.settle(operator)
            operator.kill()
            operator.start()
            assert work.world.settle(operator) == settled, "a restart changed what had come to its end"
            work.clear()
            print(f"round {work.round}: {kills} kills")
    assert "Traceback" not in operator.log.read_text(encoding="utf-8")


def kill(
    operator: Process, courses: Sequence[Future[Course | None]], work: Work, dice: random.Random, *, most: int
) -> int:
    """Kill the operator again and again, while work goes on and at most so many times; how often it was killed."""
    for count in range(most):
        operator.start()
        if dice.random() < 0.8:
            wait_for("a pass", lambda: _passes(operator) > 0, PATIENCE, operator)
        if not wait(courses, timeout=dice.uniform(0, 1.5)).not_done:
            return count
        operator.kill()
        work.check_no_two_gangs()
    return most


def _passes(operator: Process) -> float:
    return metric(operator, "finetune_operator_reconcile_seconds_count")
