"""Parts of ModelPromotions that several tables of cases share."""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

LEAST: Json = {
    "model": "docstring-llama",
    "alias": "champion",
    "source": {"type": "Alias", "alias": "staging"},
}
BETTER: Json = {"metric": "eval_loss", "goal": "Minimize", "betterBy": {"relative": 0.05}}
WINDOW: Json = {"name": "night", "schedule": "0 2 * * *", "durationSeconds": 3600}
QUERY: Json = {"url": "https://thanos.example.com/base", "query": "sum(rate(errors[1m]))"}
ON_REGRESSION: Json = {
    "action": "Rollback",
    "prometheus": QUERY,
    "max": 0.05,
    "forSeconds": 60,
    "watchSeconds": 600,
}


def promotion(**spec: Any) -> Json:
    """A complete ModelPromotion; parts of the spec replaced, or left out with None."""
    merged = {key: value for key, value in (copy.deepcopy(LEAST) | spec).items() if value is not None}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": "champion"},
        "spec": merged,
    }


def gated(**gate: Any) -> Json:
    """One with a single gate, of the type of its first part."""
    kind = next(iter(gate), "metric").capitalize()
    return promotion(gates=[{"name": "gate", "type": kind, **gate}])


def compared(**comparison: Any) -> Json:
    """One with a single comparison."""
    return gated(comparison={"metric": "eval_loss", "goal": "Minimize", **comparison})


def served(**databricks: Any) -> Json:
    """One with an endpoint, and settings of Databricks for it."""
    return _with_endpoint(databricks=databricks)


def canary(*percents: int, **fields: Any) -> Json:
    """One whose endpoint goes forward in steps."""
    steps = [{"percent": percent, "durationSeconds": 600} for percent in percents]
    return _with_endpoint(canary={"steps": steps, **fields})


def _with_endpoint(**serving: Any) -> Json:
    return promotion(serving={"type": "Databricks", "endpoint": "support", **serving})


YEAR = 366 * 24 * 3600
