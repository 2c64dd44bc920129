"""A promotion to champion with two gates, and three versions that it may promote."""

from __future__ import annotations

from typing import Any

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from fixtures.operator_in_memory.promotions import World

GATES = [
    {"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.5}},
    {
        "name": "no-worse",
        "type": "Comparison",
        "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
    },
]
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://mlflow:5000 cannot be reached: HTTP 503")


def world(**spec: Any) -> World:
    """Versions 1 to 3, of which 3 is the best, and champion from staging."""
    simulation = World()
    for version, loss in (("1", 2.4), ("2", 2.2), ("3", 2.0)):
        simulation.registry.add(version, eval_loss=loss)
    simulation.submit(**({"gates": GATES} | spec))
    return simulation
