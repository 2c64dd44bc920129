"""The chart's images: their registries, tags and digests, how they are pulled, and with which Secrets."""

from __future__ import annotations

from typing import Any

import pytest

from integration.chart_without_crds import defaults, environment, pod

Json = dict[str, Any]
DIGEST = f"sha256:{'a' * 64}"


def images(*values: str) -> list[str]:
    """The images of the operator, of jobs, and of MLflow."""
    variables = environment(*values, "mlflow.enabled=true")
    mlflow = pod(*values, "mlflow.enabled=true", name="finetune-operator-mlflow")
    return [
        pod(*values)["containers"][0]["image"],
        variables["FINETUNE_PREP_IMAGE"],
        variables["FINETUNE_TRAINER_IMAGE"],
        mlflow["containers"][0]["image"],
    ]


IMAGES = {
    "as they come": (
        (),
        [
            "finetune-operator:0.1.0",
            "finetune-prep:0.1.0",
            "finetune-trainer:0.1.0",
            "finetune-trainer:0.1.0",
        ],
    ),
    "one registry": (
        ("global.imageRegistry=r.example.com/ml", "image.operator.registry=other.example.com"),
        [
            "r.example.com/ml/finetune-operator:0.1.0",
            "r.example.com/ml/finetune-prep:0.1.0",
            "r.example.com/ml/finetune-trainer:0.1.0",
            "r.example.com/ml/finetune-trainer:0.1.0",
        ],
    ),
    "each its own": (
        (
            "image.operator.registry=a.example.com",
            "image.operator.tag=v2",
            "image.prep.repository=my/prep",
            f"image.trainer.digest={DIGEST}",
            "image.trainer.tag=v2",
            "mlflow.image.repository=mlflow",
            "mlflow.image.registry=b.example.com",
            "mlflow.image.tag=v3",
        ),
        [
            "a.example.com/finetune-operator:v2",
            "my/prep:0.1.0",
            f"finetune-trainer@{DIGEST}",
            "b.example.com/mlflow:v3",
        ],
    ),
    "a trainer for GPUs, and MLflow on the one for CPUs": (
        ("image.trainer.registry=r.example.com", "image.trainer.tag=0.1.0-cu130"),
        [
            "finetune-operator:0.1.0",
            "finetune-prep:0.1.0",
            "r.example.com/finetune-trainer:0.1.0-cu130",
            "r.example.com/finetune-trainer:0.1.0",
        ],
    ),
    "MLflow in another version of the trainer": (
        ("image.trainer.repository=my/trainer", "image.trainer.tag=v7", "mlflow.image.tag=v6"),
        ["finetune-operator:0.1.0", "finetune-prep:0.1.0", "my/trainer:v7", "my/trainer:v6"],
    ),
    "MLflow of its own, with the registry in its name": (
        ("image.trainer.registry=r.example.com", "mlflow.image.repository=b.example.com/mlflow"),
        [
            "finetune-operator:0.1.0",
            "finetune-prep:0.1.0",
            "r.example.com/finetune-trainer:0.1.0",
            "b.example.com/mlflow:0.1.0",
        ],
    ),
    "MLflow on a mirror of the trainer": (
        (
            "image.trainer.registry=r.example.com",
            "mlflow.image.registry=b.example.com",
            f"mlflow.image.digest={DIGEST}",
        ),
        [
            "finetune-operator:0.1.0",
            "finetune-prep:0.1.0",
            "r.example.com/finetune-trainer:0.1.0",
            f"b.example.com/finetune-trainer@{DIGEST}",
        ],
    ),
}


@pytest.mark.parametrize(("values", "expected"), IMAGES.values(), ids=IMAGES)
def test_references_of_images(values: tuple[str, ...], expected: list[str]) -> None:
    assert images(*values) == expected


def test_pull_policies_of_each_image() -> None:
    values = (
        "image.operator.pullPolicy=Always",
        "image.prep.pullPolicy=Never",
        "image.trainer.pullPolicy=Always",
    )
    variables = environment(*values)
    assert pod(*values)["containers"][0]["imagePullPolicy"] == "Always"
    assert (variables["FINETUNE_PREP_PULL_POLICY"], variables["FINETUNE_TRAINER_PULL_POLICY"]) == (
        "Never",
        "Always",
    )


def test_pull_secrets_are_those_of_every_pod_and_of_jobs() -> None:
    values = (
        "global.imagePullSecrets={a}",
        "imagePullSecrets[0].name=b",
        "imagePullSecrets[1].name=a",
        "defaults.imagePullSecrets[0].name=c",
        "mlflow.enabled=true",
    )
    ours = [{"name": "a"}, {"name": "b"}]
    for name in ("finetune-operator", "finetune-operator-mlflow"):
        assert pod(*values, name=name)["imagePullSecrets"] == ours
    assert defaults(*values) == {"imagePullSecrets": [*ours, {"name": "c"}]}
