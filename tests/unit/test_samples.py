"""Which samples run today, and for which parts exactly the others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from demo.install import BASE_MODEL
from finetune_crds import (
    FineTuneJob,
    FineTuneJobSpec,
    JobReference,
    ModelPromotion,
    Recipe,
    continuation,
)
from finetune_crds.reference import SAMPLES, sample_files
from finetune_operator.finetunejob.decide import mistakes
from finetune_operator.finetunejob.decide.accept import not_implemented
from finetune_operator.modelpromotion.decide import accept as promotion
from finetune_operator.policy.address import passwords
from finetune_operator.settings import Settings

INSTALLED = Settings(tracking_uri="http://mlflow:5000")
# The samples that are for CPUs; others are copied to GPUs.
ON_CPUS = {"quickstart", "quickstart-worse"}
LINES_OF_THE_SHORTEST = 14


@pytest.mark.parametrize("sample", sample_files(), ids=lambda path: path.stem)
def test_no_sample_is_refused(sample: Path) -> None:
    for part in yaml.safe_load_all(sample.read_text(encoding="utf-8")):
        if part["kind"] == "FineTuneJob":
            spec = FineTuneJob.model_validate(part).spec
            assert [
                *passwords(spec.tracking),
                *mistakes.of_training(spec),
                *mistakes.of_preparation(spec),
                *mistakes.of_evaluation(spec),
            ] == []
            assert [*not_implemented(spec)] == []
        if part["kind"] == "ModelPromotion":
            assert [*promotion.mistakes(ModelPromotion.model_validate(part).spec, INSTALLED)] == []


def comment(sample: Path) -> str:
    """What a sample says before its first manifest."""
    lines = takewhile(lambda line: line.startswith("#"), sample.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("# ") for line in lines)


def needs(spec: FineTuneJobSpec) -> Iterator[str]:
    """What a job needs that the demo's cluster does not have."""
    yield from ["GPUs"] if spec.distributed.gpus_per_node else []
    base = spec.model.base if spec.model else ""
    yield from ["a model of the Hub"] if base.count("/") == 1 and ":" not in base else []
    yield from ["an image"] if spec.trainer.image else []
    yield from ["a queue"] if spec.run_policy.queue_name else []
    yield from ["a claim"] if claims(spec) else []
    prepare = spec.prepare
    yield from ["an account that may create pods"] if prepare and prepare.spark.executor_pods else []
    resume_from = spec.checkpoint.resume_from if spec.checkpoint else None
    yield from ["checkpoints of another job"] if resume_from else []
    code = spec.trainer.code
    yield from ["a repository"] if code and code.git else []
    yield from (
        ["splits of another job"] if spec.data and spec.data.splits and not spec.trainer.command else []
    )


def claims(spec: FineTuneJobSpec) -> set[str]:
    """The claims that the pods of a job mount."""
    templates = [spec.pod_template, spec.prepare.pod_template if spec.prepare else None]
    volumes = [volume for item in templates if item for volume in item["spec"].get("volumes", [])]
    cache = [spec.model_cache.claim_name] if spec.model_cache else []
    return {
        item["persistentVolumeClaim"]["claimName"] for item in volumes if "persistentVolumeClaim" in item
    } | {*cache}


@pytest.mark.parametrize("sample", sample_files(), ids=lambda path: path.stem)
def test_the_first_line_says_what_a_sample_needs(sample: Path) -> None:
    parts = [*yaml.safe_load_all(sample.read_text(encoding="utf-8"))]
    made = {part["metadata"]["name"] for part in parts if part["kind"] == "PersistentVolumeClaim"}
    for part in parts:
        if part["kind"] == "FineTuneJob":
            spec = FineTuneJob.model_validate(part).spec
            missing = [*needs(spec)]
            assert comment(sample).startswith("Needs ") == bool(missing), missing
            assert [name for name in claims(spec) - made if name not in comment(sample)] == []
            # A precision for CPUs costs most of the speed of a GPU.
            assert (spec.training.precision == "FP32") == (sample.stem in ON_CPUS)


@pytest.mark.parametrize("name", ["support-chat", "promotion-support-chat"])
def test_the_shortest_objects_are_short(name: str) -> None:
    lines = (SAMPLES / "gpu" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= LINES_OF_THE_SHORTEST


def test_the_rehearsal_on_cpus_changes_the_device_and_the_model_alone() -> None:
    (change,) = yaml.safe_load((SAMPLES / "cpu" / "kustomization.yaml").read_text(encoding="utf-8"))[
        "patches"
    ]
    assert yaml.safe_load(change["patch"])["spec"] == {
        "model": {"base": BASE_MODEL},
        "distributed": {"gpusPerNode": None, "device": "CPU"},
    }


def test_the_sample_that_carries_a_run_on_may() -> None:
    first, second = (job_of(SAMPLES / f"{name}.yaml") for name in ("lora", "carried-on"))
    assert continuation.differences(continuation.settings(first), second) == []


def job_of(sample: Path) -> Recipe:
    (body,) = yaml.safe_load_all(sample.read_text(encoding="utf-8"))
    name = body["metadata"]["name"]
    return Recipe.of(JobReference(name=name, namespace="n", uid=name), FineTuneJob.model_validate(body).spec)
