"""A Job of a promotion around its pod."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.pods import MAIN_CONTAINER
from finetune_operator import names
from finetune_operator.batch.pod_defaults import IGNORE_DISRUPTION
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.owners import build_owner_reference
from finetune_operator.template_merge import merge

ENV_RUN_ID = "MLFLOW_RUN_ID"


def wrap_pod(
    promotion: Promotion,
    pod: Json,
    *,
    name: str,
    component: str,
    version: str,
    retries: int,
    failure_rules: Sequence[Json] = (),
) -> Json:
    """Build a Job, with one pod at a time.

    Args:
        pod: the pod template.
        component: names.GATE or names.COPY.
        version: the version that the Job judges or copies.
        retries: how many pods may run after one that failed. Evicted and preempted pods do not count.
        failure_rules: rules of the podFailurePolicy, after the one for evicted and preempted pods.
    """
    identifiers = {names.ANNOTATION_PROMOTION: promotion.name, names.ANNOTATION_VERSION: version}
    labels = {
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
        names.LABEL_UID: promotion.uid,
        names.LABEL_COMPONENT: component,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": promotion.namespace,
            "labels": labels,
            "annotations": identifiers,
            "ownerReferences": [build_owner_reference("ModelPromotion", promotion.name, promotion.uid)],
        },
        "spec": {
            # NB: without ttlSecondsAfterFinished, which the operator sets once the result is recorded: it may be down for longer.
            "backoffLimit": retries,
            "podFailurePolicy": {"rules": [IGNORE_DISRUPTION, *failure_rules]},
            "template": merge(pod, {"metadata": {"labels": labels, "annotations": identifiers}}),
        },
    }


def add_run(job: Json, run_id: str) -> Json:
    """The Job with its MLflow run, as an annotation and as a variable of its pods."""
    variable = {"name": ENV_RUN_ID, "value": run_id}
    addition = {
        "metadata": {"annotations": {names.ANNOTATION_RUN: run_id}},
        "spec": {"template": {"spec": {"containers": [{"name": MAIN_CONTAINER, "env": [variable]}]}}},
    }
    return dict(merge(job, addition))
