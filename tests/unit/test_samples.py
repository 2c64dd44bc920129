"""Which samples run today, and for which parts exactly the others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.install import BASE_MODEL
from finetune_crds import (
    FineTuneJob,
    FineTuneJobSpec,
    FineTuneSchedule,
    JobReference,
    ModelPromotion,
    Recipe,
    continuation,
    contract,
)
from finetune_crds.evaluation import BASE_PREFIX, NUMBER_NAMES
from finetune_crds.gates import Gate, JobGate
from finetune_crds.pods import ROLES
from finetune_crds.reference import SAMPLES, sample_files
from finetune_crds.resources import RESOURCES, Resource
from finetune_crds.schema import Schema, crd
from finetune_crds.sinks import find_sink
from finetune_operator.finetunejob.decide.accept import unsupported_fields
from finetune_operator.finetunejob.draft import mistakes
from finetune_operator.modelpromotion.decide import accept as promotion
from finetune_operator.policy.address import find_passwords
from finetune_operator.policy.cron import Cron
from finetune_operator.serving.choose import choose_backend
from finetune_operator.serving.databricks import traffic
from finetune_operator.settings import Settings

Json = dict[str, Any]

INSTALLED = Settings(tracking_uri="http://mlflow:5000")
# The samples that are for CPUs; others are copied to GPUs.
ON_CPUS = {"quickstart", "quickstart-worse"}
LINES_OF_THE_SHORTEST = 14
# What the built-in loop writes of each version: tags, and metrics of the run.
OF_THE_TRAINER = {
    contract.TAG_EVAL_LOSS,
    contract.TAG_PERPLEXITY,
    contract.METRIC_EVAL_LOSS,
    contract.METRIC_EVAL_PERPLEXITY,
    contract.METRIC_FINAL_EVAL_LOSS,
    contract.METRIC_FINAL_EVAL_PERPLEXITY,
}
EXPORTED = """request_count_total{served="a"} 10
request_4xx_count_total{served="a"} 1
request_5xx_count_total{served="a"} 1
request_latency_ms_sum{served="a"} 500
request_latency_ms_count{served="a"} 10
"""


def job_body(part: Json) -> Json:
    """A FineTuneJob, or that of the template of a FineTuneSchedule."""
    return part if part["kind"] == "FineTuneJob" else dict(part["spec"]["jobTemplate"])


@pytest.mark.parametrize("sample", sample_files(), ids=lambda path: path.stem)
def test_no_sample_is_refused(sample: Path) -> None:
    for part in yaml.safe_load_all(sample.read_text(encoding="utf-8")):
        if part["kind"] in ("FineTuneJob", "FineTuneSchedule"):
            spec = FineTuneJob.model_validate(job_body(part)).spec
            assert [
                *find_passwords(spec.tracking),
                *mistakes.of_training(spec),
                *mistakes.of_preparation(spec),
                *mistakes.of_evaluation(spec),
            ] == []
            assert [*unsupported_fields(spec)] == []
        if part["kind"] == "FineTuneSchedule":
            schedule_spec = FineTuneSchedule.model_validate(part).spec
            Cron.parse(schedule_spec.schedule, schedule_spec.time_zone)
        if part["kind"] == "ModelPromotion":
            promotion_spec = ModelPromotion.model_validate(part).spec
            backend = choose_backend(promotion_spec.serving) if promotion_spec.serving else None
            assert [*promotion.mistakes(promotion_spec, backend, INSTALLED)] == []


@pytest.mark.parametrize("sample", sample_files(), ids=lambda path: path.stem)
def test_conversations_of_several_turns_can_be_learned(sample: Path) -> None:
    """Templates of thinking models change earlier answers, so that the default loss on all answers is refused."""
    for part in yaml.safe_load_all(sample.read_text(encoding="utf-8")):
        base = (
            part["spec"]["model"]["base"] if part["kind"] == "FineTuneJob" and "model" in part["spec"] else ""
        )
        is_thinking = base.startswith("Qwen/Qwen3-") and "-Instruct-" not in base
        assert not is_thinking or part["spec"].get("objective", {}).get("lossOn") in {"LastAnswer", "All"}


def comment(sample: Path) -> str:
    """What a sample says before its first manifest."""
    lines = takewhile(lambda line: line.startswith("#"), sample.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("# ") for line in lines)


def needs(spec: FineTuneJobSpec) -> Iterator[str]:
    """What a job needs that the demo's cluster does not have."""
    yield from ["GPUs"] if spec.distributed.gpus_per_node else []
    base = spec.model.base if spec.model else ""
    yield from ["a model of the Hub"] if base.count("/") == 1 and ":" not in base else []
    yield from ["an image"] if any(spec.pods.of(role).image for role in ROLES) else []
    yield from ["a queue"] if spec.run_policy.queue_name else []
    yield from ["a claim"] if claims(spec) else []
    prepare = spec.prepare
    yield from ["an account that may create pods"] if prepare and prepare.spark.executor_pods else []
    resume_from = spec.checkpoint.resume_from if spec.checkpoint else None
    yield from ["checkpoints of another job"] if resume_from else []
    code = spec.trainer.code
    yield from ["a repository"] if code and code.git else []
    yield from ["a project in W&B"] if find_sink(spec.tracking.sinks, "WandB") else []
    yield from (
        ["splits of another job"] if spec.data and spec.data.splits and not spec.trainer.command else []
    )


def claims(spec: FineTuneJobSpec) -> set[str]:
    """The claims that the pods of a job mount."""
    templates = [settings.template for _, settings in spec.pods.each()]
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
        if part["kind"] in ("FineTuneJob", "FineTuneSchedule"):
            spec = FineTuneJob.model_validate(job_body(part)).spec
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


def test_the_chain_prefers_among_the_very_texts_that_it_trained_on() -> None:
    parts = yaml.safe_load_all((SAMPLES / "chain.yaml").read_text(encoding="utf-8"))
    first, second = (part["spec"]["data"] for part in parts if part["kind"] == "FineTuneJob")
    # NB: an answer without the space before it is other tokens. Preferences among those make the answers of the first job unlikely.
    assert first["prepare"]["responseTemplate"] == f"{{{second['columns']['chosen']}}}"
    assert second["prepare"]["promptTemplate"] == first["prepare"]["promptTemplate"]


def bodies(kind: str) -> list[Json]:
    """All objects of a kind among the samples."""
    parts = [part for path in sample_files() for part in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [part for part in parts if part["kind"] == kind]


def measured(spec: FineTuneJobSpec) -> set[str]:
    """The numbers that a job gives the version that it registers, but for those of commands of its own."""
    own = set() if spec.trainer.command else OF_THE_TRAINER
    if spec.evaluation is None or spec.evaluation.command:
        return own
    evaluated = {name for metric in spec.evaluation.selected_metrics for name in NUMBER_NAMES[metric]}
    return (
        own
        | evaluated
        | ({BASE_PREFIX + name for name in evaluated} if spec.evaluation.base_model else set())
    )


def judged(gates: Iterable[Gate]) -> set[str]:
    """The numbers of the version that gates look at, without those that a Job reports."""
    of_version = [gate for gate in gates if gate.job_name is None]
    bounds = {gate.metric.name for gate in of_version if gate.metric}
    return bounds | {gate.comparison.metric for gate in of_version if gate.comparison}


def reported(job: JobGate) -> str:
    """What the command of a gate's Job says, in which the names of its numbers are."""
    return "\n".join([*job.args, *(item.value or "" for item in job.env)])


@pytest.mark.parametrize("body", bodies("ModelPromotion"), ids=lambda body: str(body["metadata"]["name"]))
def test_the_numbers_of_jobs_are_reported_by_their_scripts(body: Json) -> None:
    gates = ModelPromotion.model_validate(body).spec.gates
    jobs = {gate.name: gate.job for gate in gates if gate.job}
    for gate in gates:
        part = gate.metric.name if gate.metric else gate.comparison.metric if gate.comparison else ""
        assert gate.job_name is None or part in reported(jobs[gate.job_name])
    for job in jobs.values():
        compile(job.args[0], body["metadata"]["name"], "exec")


def registered() -> Iterator[tuple[str, FineTuneJobSpec]]:
    """The name of each model that a sample job registers, and its spec."""
    for body in [*bodies("FineTuneJob"), *bodies("FineTuneSchedule")]:
        spec = FineTuneJob.model_validate(job_body(body)).spec
        if spec.register_:
            yield spec.register_.model or body["metadata"]["name"], spec


@pytest.mark.parametrize("body", bodies("ModelPromotion"), ids=lambda body: str(body["metadata"]["name"]))
def test_a_promotion_gates_on_numbers_that_a_sample_gives_its_model(body: Json) -> None:
    spec = ModelPromotion.model_validate(body).spec
    model = spec.model or body["metadata"]["name"]
    written = {number for name, job in registered() if name == model for number in measured(job)}
    assert judged(spec.gates) <= written
    canary = spec.serving.canary if spec.serving else None
    assert judged(canary.gates if canary else []) <= written | {*traffic.parse_traffic(EXPORTED, "a")}


def job_of(sample: Path) -> Recipe:
    (body,) = yaml.safe_load_all(sample.read_text(encoding="utf-8"))
    name = body["metadata"]["name"]
    return Recipe.of(JobReference(name=name, namespace="n", uid=name), FineTuneJob.model_validate(body).spec)


# The other form of what a sample has, what most jobs leave as it is, and what people set later.
IN_NO_SAMPLE = {
    "FineTuneJob": {
        "spec.checkpoint.resumeFrom.uri",
        "spec.data.columns.margin",
        "spec.data.prepare.spark.databricks.compute.newCluster.instancePoolId",
        "spec.model.chatTemplate.jinja",
        "spec.model.trustRemoteCode",
        "spec.objective.distillation.teacherTrustRemoteCode",
        "spec.register.signature",
        "spec.training.decayRatio",
        "spec.training.earlyStopping.minDelta",
        "spec.training.maxGradNorm",
        "spec.training.truncation",
        "spec.training.perDeviceEvalBatchSize",
        "spec.training.seed",
    },
    "ModelPromotion": {
        "spec.approvals[].by",
        "spec.approvals[].version",
        "spec.gates[].comparison.betterBy.absolute",
        "spec.source.registry.version",
        "spec.suspend",
    },
    "FineTuneSchedule": set[str](),
}
# Parts of the API with the same fields, of which a sample needs to have each field once.
SAME_PARTS = (
    (re.compile(r"^spec\.pods\.\w+"), "spec.pods.ROLE"),
    (re.compile(r"^spec\.data\.(prepare\.decontaminate|source)\.sources\[\]"), "spec.data.source"),
    (re.compile(r"^spec\.data\.source\.feedback\.version"), "spec.data.source.version"),
    (re.compile(r"^spec\.serving\.canary\.gates\[\]"), "spec.gates[]"),
    (re.compile(r"^.*(secret|configMap)Ref\.optional$", re.IGNORECASE), "REFERENCE.optional"),
)


@pytest.mark.parametrize("kind", RESOURCES, ids=lambda kind: str(kind.KIND))
def test_a_sample_has_each_field(kind: Resource) -> None:
    schema = crd(kind, documented=True)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    names = {unify(path) for path in fields(schema["properties"]["spec"], "spec")}
    bodies_of_kind = [body["spec"] for body in bodies(kind.KIND)]
    if kind is FineTuneJob:
        bodies_of_kind += [job_body(body)["spec"] for body in bodies(FineTuneSchedule.KIND)]
    in_samples = {unify(path) for spec in bodies_of_kind for path in set_in(spec, "spec")}
    # NB: one sample with an optional reference is enough for all kinds.
    assert names - in_samples - {"REFERENCE.optional"} == IN_NO_SAMPLE[kind.KIND]
    assert kind is not FineTuneJob or "REFERENCE.optional" in in_samples


def unify(path: str) -> str:
    """Return the path of a field, with one name for parts that have the same fields."""
    for pattern, name in SAME_PARTS:
        path = pattern.sub(name, path)
    return path


def fields(schema: Schema, where: str) -> Iterator[str]:
    """The paths of the fields below an object; `[]` stands for the items of a list."""
    for name, item in schema.get("properties", {}).items():
        yield from leaves(item, f"{where}.{name}")


def leaves(schema: Schema, path: str) -> Iterator[str]:
    """The paths of the fields of a field; its own path if it has none."""
    if "properties" in schema:
        yield from fields(schema, path)
    elif "properties" in schema.get("items", {}):
        yield from fields(schema["items"], f"{path}[]")
    else:
        yield path


def set_in(value: object, where: str) -> Iterator[str]:
    """The paths of an object's fields."""
    yield where
    if isinstance(value, dict):
        for name, item in value.items():
            yield from set_in(item, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from set_in(item, f"{where}[]")
