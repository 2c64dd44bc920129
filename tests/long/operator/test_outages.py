"""The API server and MLflow are away for seconds, again and again, while jobs and promotions go on."""

from __future__ import annotations

import random
import re
from concurrent.futures import wait
from pathlib import Path

from fixtures.operator_processes.link import OUTAGES, outages
from long.amounts import OUTAGES as COUNT
from long.amounts import SEED
from long.operator.work import Work
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.process import running

MOST_IN_A_ROUND = 12


def test_an_operator_whose_servers_are_away_loses_and_repeats_nothing(
    kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    print(f"outages at random moments with SEED = {SEED}")
    dice = random.Random(SEED)  # noqa: S311 - the seed makes a failure repeatable
    direct = kubeconfig.read_text(encoding="utf-8")
    (api_port,) = re.findall(r"https://127\.0\.0\.1:(\d+)", direct)
    with outages() as network:
        links = {"API server": network.link(int(api_port)), "MLflow": network.link(mlflow_server.port)}
        through = tmp_path / "kubeconfig"
        through.write_text(direct.replace(f":{api_port}", f":{links['API server'].port}"), encoding="utf-8")
        tracking_uri = f"http://127.0.0.1:{links['MLflow'].port}"
        environment = watching(namespace, tracking_uri, resync_seconds=1)
        operator = operator_process(through, tmp_path / "operator.log", environment)
        # The players' own connections have no outages.
        work = Work(kubeconfig, mlflow_server, namespace, dice)
        count = 0
        with running(operator):
            work.begin()
            while count < COUNT:
                with work.one_round() as courses:
                    for _ in range(min(MOST_IN_A_ROUND, COUNT - count)):
                        server, kind = dice.choice(sorted(links)), dice.choice(OUTAGES)
                        with network.outage(links[server], kind):
                            wait(courses, timeout=dice.uniform(0.1, 4))
                        count += 1
                        work.check_no_two_gangs()
                        if not wait(courses, timeout=dice.uniform(0, 2)).not_done:
                            break
                    work.check([course.result() for course in courses])
                work.clear()
                assert operator.alive(), operator.tail()
                print(f"round {work.round}: {count} outages")
    assert "Traceback" not in operator.log.read_text(encoding="utf-8")
