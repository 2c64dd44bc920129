"""The NetworkPolicy of a job whose pods connect to each other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    SETTINGS,
    UID,
    conclude,
    ftj,
    observed,
    status,
    tracked,
)

Json = dict[str, Any]
OWN_PODS: Json = {"podSelector": {"matchLabels": {"finetune.dev/job-uid": UID}}}


def children(before: Any = None, settings: Settings = SETTINGS, **parts: Any) -> dict[str, Json]:
    """What a pass creates, by kind."""
    decision = conclude(ftj(before, **parts), observed(mlflow=tracked()), settings=settings)
    return {body["kind"]: body for body in decision.apply}


def prepare_with(**spark: Any) -> Json:
    """A job that prepares first."""
    source = {"type": "Parquet", "path": "s3://lake/raw"}
    data = {"source": source, "prepare": {"output": "s3://lake/out", "spark": spark}}
    return {"before": status(ADMITTED), "data": data}


ONE_RANK: Json = {"distributed": {"nodes": 1}}
WITHOUT = replace(SETTINGS, network_policies=False)
# What a job is made with, and whether it gets a NetworkPolicy.
JOBS: dict[str, tuple[Json, bool]] = {
    "two pods": ({"distributed": {"nodes": 2}}, True),
    "two ranks in one pod": ({"distributed": {"nodes": 1, "processesPerNode": 2}}, True),
    "two GPUs in one pod": ({"distributed": {"nodes": 1, "gpusPerNode": 2}}, True),
    "one rank": (ONE_RANK, False),
    "the installation has none": ({"settings": WITHOUT}, False),
    "a preparation in one pod before two pods": (prepare_with(mode="Local"), False),
    "executors before two pods": (prepare_with(mode="Kubernetes"), True),
    "executors before one rank": (prepare_with(mode="Kubernetes") | ONE_RANK, True),
    "executors of an installation that has none": (
        prepare_with(mode="Kubernetes") | {"settings": WITHOUT},
        False,
    ),
    "executors of the spark-operator": (prepare_with(mode="SparkApplication"), False),
}


@pytest.mark.parametrize(("parts", "has_policy"), JOBS.values(), ids=JOBS)
def test_a_job_whose_pods_connect_to_each_other_has_a_policy(parts: Json, *, has_policy: bool) -> None:
    kinds = children(**parts).keys()
    assert kinds & {"Job", "SparkApplication"}
    assert ("NetworkPolicy" in kinds) == has_policy


def test_pods_accept_connections_only_from_pods_of_their_job() -> None:
    bodies = children()
    assert bodies["NetworkPolicy"] == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            **bodies["Service"]["metadata"],
            "labels": {
                "app.kubernetes.io/managed-by": "finetune-operator",
                "finetune.dev/job": "tune",
                "finetune.dev/job-uid": UID,
            },
        },
        "spec": {**OWN_PODS, "policyTypes": ["Ingress"], "ingress": [{"from": [OWN_PODS]}]},
    }


def test_the_policy_selects_all_pods_of_the_job() -> None:
    selected = OWN_PODS["podSelector"]["matchLabels"].items()
    train = children()["Job"]["spec"]["template"]
    driver = children(**prepare_with(mode="Kubernetes"))["Job"]["spec"]["template"]
    variables = {item["name"]: item.get("value") for item in driver["spec"]["containers"][0]["env"]}
    executor = json.loads(variables["FINETUNE_EXECUTOR_TEMPLATE"].replace("$$", "$"))
    for pod in (train, driver, executor):
        assert selected <= pod["metadata"]["labels"].items()
