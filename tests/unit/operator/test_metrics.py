"""The metrics: names, requests, and gauges that are replaced at once."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics import MetricWrapperBase

from finetune_crds.status import AttemptCause
from finetune_operator import metrics
from support.counted import counted

METRICS = [item for item in vars(metrics).values() if isinstance(item, MetricWrapperBase)]
# Labels that identify one object have no limit. Prometheus sets job, instance and namespace itself.
LABELS = {"kind", "reason", "server", "code", "phase", "status", "cause", "job_namespace"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric._name)
def test_names_follow_the_conventions_of_prometheus(metric: MetricWrapperBase) -> None:
    (family,) = metric.describe()
    assert re.fullmatch(r"finetune_operator(_[a-z]+)+", family.name)
    assert not re.search(r"hours|minutes|_ms|milli|total", family.name)
    assert (family.type == "histogram") <= family.name.endswith("_seconds")
    assert {*metric._labelnames} <= LABELS
    assert family.documentation[0].isupper()
    assert not family.documentation.endswith(".")


def test_counters_that_alerts_watch_begin_at_zero() -> None:
    causes = {labels[0] for labels in metrics.job_restarts._metrics}
    ends = {labels[0] for labels in metrics.jobs_finished._metrics}
    assert (causes, ends) == ({*get_args(AttemptCause)}, {"Succeeded", "Failed"})
    kinds = ("FineTuneJob", "ModelPromotion", "FineTuneSchedule")
    errors = {(kind, "InternalError") for kind in kinds}
    assert {*metrics.reconcile_errors._metrics} >= errors


def test_a_request_is_counted_by_its_status() -> None:
    with counted() as changes:
        for status in (200, 404):
            with metrics.measuring_request("MLflow") as sent:
                sent.status = status
        with pytest.raises(TimeoutError), metrics.measuring_request("MLflow"):
            raise TimeoutError
    changes.pop("request_seconds_sum MLflow", None)
    assert changes == {
        "request_seconds_count MLflow": 3,
        "requests_total MLflow 200": 1,
        "requests_total MLflow 404": 1,
        "requests_total MLflow none": 1,
    }


def test_samples_that_no_longer_exist_are_removed() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("resources", "Resources", ["phase"], registry=registry)
    steps: list[dict[tuple[str, ...], float]] = [{("a",): 1.0, ("b",): 2.0}, {("b",): 3.0}, {}]
    for samples in steps:
        metrics.replace_samples(gauge, samples)
        published = {
            (sample.labels["phase"],): sample.value for family in gauge.collect() for sample in family.samples
        }
        assert published == samples
