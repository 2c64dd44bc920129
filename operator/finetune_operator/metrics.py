"""The operator's own metrics, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

reconcile_seconds = Histogram("finetune_reconcile_seconds", "Time of one pass over one resource", ["kind"])
reconcile_errors = Counter("finetune_reconcile_errors", "Passes that failed and will be repeated", ["kind"])
queue_depth = Gauge("finetune_queue_depth", "Resources that wait for a worker", ["kind"])
queue_oldest_seconds = Gauge(
    "finetune_queue_oldest_seconds", "How long the oldest of them has waited", ["kind"]
)
jobs = Gauge("finetune_jobs", "FineTuneJobs by phase", ["phase"])
promotions = Gauge("finetune_promotions", "ModelPromotions by phase", ["phase"])
