"""Acto's three oracles over FineTuneJobs and ModelPromotions: 60 seeded operations on a real API server with played pods."""

from __future__ import annotations

from pathlib import Path

from fixtures.operator_processes.operation_sequences import play
from fixtures.operator_processes.world import OwnWorld

SEED, OPERATIONS, PLAYERS = 562, 60, 6


def test_the_oracles_raise_no_alarm(own_world: OwnWorld, kubeconfig: Path) -> None:
    done = play(
        kubeconfig,
        own_world.mlflow,
        own_world.namespace,
        seed=SEED,
        operations=OPERATIONS,
        players=PLAYERS,
    )
    assert done >= OPERATIONS
    own_world.settle(own_world.operator)
