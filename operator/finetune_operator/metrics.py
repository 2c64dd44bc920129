"""The operator's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

reconcile_seconds = Histogram("finetune_reconcile_seconds", "Duration of one reconcile", ["kind"])
reconcile_errors = Counter("finetune_reconcile_errors", "Reconciles that failed and are retried", ["kind"])
queue_depth = Gauge("finetune_queue_depth", "Resources waiting for a worker", ["kind"])
queue_oldest_seconds = Gauge(
    "finetune_queue_oldest_seconds", "Longest time a resource has been waiting for a worker", ["kind"]
)
jobs = Gauge("finetune_jobs", "FineTuneJobs by phase", ["phase"])
promotions = Gauge("finetune_promotions", "ModelPromotions by phase", ["phase"])
promotions_ready = Gauge(
    "finetune_promotions_ready", "ModelPromotions by their condition Ready", ["status", "reason"]
)
is_leader = Gauge("finetune_operator_is_leader", "1 if this replica of the operator leads, 0 if it stands by")
