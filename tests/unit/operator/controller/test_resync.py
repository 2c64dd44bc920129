"""The periodic list."""

from __future__ import annotations

from unittest.mock import MagicMock

from finetune_crds.base import Json
from finetune_operator import metrics
from finetune_operator.controller.resync import Resync
from finetune_operator.controller.store import Store

PHASES = {"a": "Training", "b": "Training", "c": "Failed", "d": None}


def test_resources_are_counted_by_their_phase() -> None:
    store = Store()
    for name, phase in PHASES.items():
        body = {"metadata": {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1"}}
        store.put("FineTuneJob", body | ({"status": {"phase": phase}} if phase else {}))
    metrics.jobs.labels("Succeeded").set(3)
    Resync(MagicMock(), store, MagicMock(), MagicMock(), MagicMock())._publish_metrics()
    samples = {
        sample.labels["phase"]: sample.value for metric in metrics.jobs.collect() for sample in metric.samples
    }
    assert samples == {"Training": 2, "Failed": 1, "Pending": 1}


def ready(status: str, reason: str) -> list[Json]:
    """The conditions of a promotion."""
    return [
        {"type": "Accepted", "status": "True", "reason": "Accepted"},
        {"type": "Ready", "status": status, "reason": reason},
    ]


CONDITIONS: dict[str, list[Json]] = {
    "a": ready("False", "DatabricksForbidden"),
    "b": ready("False", "DatabricksForbidden"),
    "c": ready("True", "MoveRefused"),
    "new": [],
}


def test_promotions_are_counted_by_their_condition_ready() -> None:
    store = Store()
    for name, conditions in CONDITIONS.items():
        meta = {"namespace": "team", "name": name, "uid": name, "resourceVersion": "1"}
        store.put("ModelPromotion", {"metadata": meta, "status": {"conditions": conditions}})
    metrics.promotions_ready.labels("True", "Promoted").set(3)
    Resync(MagicMock(), store, MagicMock(), MagicMock(), MagicMock())._publish_metrics()
    samples = {
        tuple(sample.labels.values()): sample.value
        for metric in metrics.promotions_ready.collect()
        for sample in metric.samples
    }
    assert samples == {("False", "DatabricksForbidden"): 2, ("True", "MoveRefused"): 1}
