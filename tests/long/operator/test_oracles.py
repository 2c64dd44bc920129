"""Acto's three oracles over FineTuneJobs and ModelPromotions: 1,000 random operations, other ones in each run."""

from __future__ import annotations

from pathlib import Path

from fixtures.operator_processes.operation_sequences import play
from long.amounts import OPERATIONS, SEED
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.process import running

PLAYERS = 6


def test_the_oracles_raise_no_alarm(
    kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    print(f"operations with SEED = {SEED}")
    environment = watching(namespace, mlflow_server.uri, resync_seconds=1)
    operator = operator_process(kubeconfig, tmp_path / "operator.log", environment)
    with running(operator):
        done = play(kubeconfig, mlflow_server, namespace, seed=SEED, operations=OPERATIONS, players=PLAYERS)
        print(f"{done} operations")
    assert "Traceback" not in operator.log.read_text(encoding="utf-8")
