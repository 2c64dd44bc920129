"""The operator's Prometheus metrics. docs/operations/monitoring.md explains them.

Counters and histograms start from zero with each process. What happens to a job is counted after the status that records it was
written, so no restart of the operator counts anything twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from finetune_crds.conditions import ConditionReason
from finetune_crds.status import AttemptCause

Server = Literal["Kubernetes", "MLflow", "Databricks", "Git", "Prometheus", "Webhook"]
NO_RESPONSE = "none"
"""The code of a request without a response."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# The buckets for passes and requests: from a pass that the cache answers to the longest timeout.
_SHORT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

reconcile_seconds = Histogram(
    "finetune_operator_reconcile_seconds",
    "Duration of one pass over a resource",
    ["kind"],
    buckets=_SHORT_SECONDS,
)
reconcile_errors = Counter(
    "finetune_operator_reconcile_errors", "Passes that failed and are retried", ["kind", "reason"]
)
queue_depth = Gauge("finetune_operator_queue_depth", "Resources that wait for a worker", ["kind"])
queue_oldest_seconds = Gauge(
    "finetune_operator_queue_oldest_seconds", "Longest time that a resource has waited for a worker", ["kind"]
)

request_seconds = Histogram(
    "finetune_operator_request_seconds",
    "Duration of one request to a server, with its response",
    ["server"],
    buckets=_SHORT_SECONDS,
)
requests = Counter(
    "finetune_operator_requests",
    "Requests to servers by HTTP status; the code is none without a response",
    ["server", "code"],
)

jobs = Gauge("finetune_operator_jobs", "FineTuneJobs by phase", ["phase"])
jobs_ready = Gauge(
    "finetune_operator_jobs_ready", "FineTuneJobs by their condition Ready", ["status", "reason"]
)
job_phase_oldest_seconds = Gauge(
    "finetune_operator_job_phase_oldest_seconds",
    "Longest time that an unfinished FineTuneJob has been in its phase",
    ["phase"],
)
jobs_at_restart_limit = Gauge(
    "finetune_operator_jobs_at_restart_limit",
    "Unfinished FineTuneJobs whose restarts have reached runPolicy.maxRestarts",
    ["job_namespace"],
)
job_phase_seconds = Histogram(
    "finetune_operator_job_phase_seconds",
    "Time that a FineTuneJob spent in a phase, counted when it leaves the phase",
    ["phase"],
    buckets=(
        10,
        30,
        _MINUTE,
        5 * _MINUTE,
        15 * _MINUTE,
        _HOUR,
        4 * _HOUR,
        12 * _HOUR,
        _DAY,
        3 * _DAY,
        7 * _DAY,
    ),
)
job_restarts = Counter(
    "finetune_operator_job_restarts",
    "Training attempts that ended, or that Kueue stopped, if the job went on afterwards",
    ["cause"],
)
jobs_finished = Counter("finetune_operator_jobs_finished", "FineTuneJobs that have finished", ["phase"])

gpus = Gauge(
    "finetune_operator_gpus",
    "GPUs of those pods of FineTuneJobs that have a node and have not ended",
    ["job_namespace", "phase"],
)
idle_gpus_oldest_seconds = Gauge(
    "finetune_operator_idle_gpus_oldest_seconds",
    "Longest time that a FineTuneJob has held GPUs in a phase that does not use them",
    ["job_namespace"],
)
pod_seconds = Counter(
    "finetune_operator_pod_seconds", "Running time of the pods of FineTuneJobs", ["job_namespace"]
)
gpu_seconds = Counter(
    "finetune_operator_gpu_seconds",
    "Running time of the pods of FineTuneJobs, multiplied by their GPUs",
    ["job_namespace"],
)
finished_pod_seconds = Counter(
    "finetune_operator_finished_pod_seconds",
    "Running time of all pods of FineTuneJobs that finished with status.productiveSeconds",
    ["job_namespace"],
)
useful_pod_seconds = Counter(
    "finetune_operator_useful_pod_seconds",
    "Part of finetune_operator_finished_pod_seconds_total that was spent on steps whose result was kept",
    ["job_namespace"],
)

promotions = Gauge("finetune_operator_promotions", "ModelPromotions by phase", ["phase"])
promotions_ready = Gauge(
    "finetune_operator_promotions_ready", "ModelPromotions by their condition Ready", ["status", "reason"]
)
schedules = Gauge("finetune_operator_schedules", "FineTuneSchedules by phase", ["phase"])
schedules_ready = Gauge(
    "finetune_operator_schedules_ready", "FineTuneSchedules by their condition Ready", ["status", "reason"]
)
is_leader = Gauge(
    "finetune_operator_is_leader", "Whether this replica of the operator leads (1) or stands by (0)"
)

tenancy_outdated = Gauge(
    "finetune_operator_tenancy_outdated",
    "Whether the file with the tenancy has a mistake (1), so that the rules that were read before apply",
)

# Create the series at zero. NB: a counter that appears with its first event has no earlier sample, so `increase` would not show the event.
for _cause in get_args(AttemptCause):
    job_restarts.labels(_cause)
for _phase in ("Succeeded", "Failed"):
    jobs_finished.labels(_phase)
for _kind in ("FineTuneJob", "ModelPromotion", "FineTuneSchedule"):
    reconcile_errors.labels(_kind, ConditionReason.INTERNAL_ERROR.value)
COUNTERS_BY_NAMESPACE = (pod_seconds, gpu_seconds, finished_pod_seconds, useful_pod_seconds)
"""Counters whose series begin at zero when a namespace has a job."""


@dataclass
class SentRequest:
    """A request in `measuring_request`; `status` is set when the response has arrived."""

    status: int | None = None


@contextmanager
def measuring_request(server: Server) -> Iterator[SentRequest]:
    """Measure the request that is sent in this context."""
    sent, started = SentRequest(), time.monotonic()
    try:
        yield sent
    finally:
        request_seconds.labels(server).observe(time.monotonic() - started)
        requests.labels(server, NO_RESPONSE if sent.status is None else str(sent.status)).inc()


def replace_samples(gauge: Gauge, samples: Mapping[tuple[str, ...], float]) -> None:
    """Set the samples of a gauge, by the values of their labels, and remove its other samples.

    NB: `clear` and then `set` would let a scrape in between read an incomplete gauge.
    """
    for labels, value in samples.items():
        gauge.labels(*labels).set(value)
    published = {tuple(sample.labels.values()) for family in gauge.collect() for sample in family.samples}
    for labels in published - samples.keys():
        gauge.remove(*labels)
