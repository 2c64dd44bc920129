"""The periodic list."""

from __future__ import annotations

from unittest.mock import MagicMock

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
    Resync(MagicMock(), store, MagicMock(), MagicMock(), MagicMock())._count()
    samples = {
        sample.labels["phase"]: sample.value for metric in metrics.jobs.collect() for sample in metric.samples
    }
    assert samples == {"Training": 2, "Failed": 1, "Pending": 1}
