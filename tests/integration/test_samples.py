"""Every sample is a manifest that the API server accepts as it stands."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from finetune_crds import FineTuneJob, ModelPromotion, ModelPromotionSpec
from finetune_crds.gates import ComparisonGate, Gate
from finetune_crds.modelpromotion import Source
from finetune_crds.objective import ObjectiveType
from finetune_crds.reference import SAMPLES as FOLDER
from finetune_crds.reference import sample_files
from finetune_crds.resources import RESOURCES
from finetune_crds.serving import DatabricksServing, Serving
from finetune_crds.training import MethodType
from fixtures.operator_processes.operators import SharedOperator
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import World
from support.manifests import parse
from support.waiting import wait_for

Json = dict[str, Any]
SAMPLES = sample_files()
# The samples whose jobs wait for something else than their pods in a namespace without Secrets, of an installation without defaults.
WAITS = {
    "support-intents": "DatabricksNotConfigured",
    "inference-table": "DatabricksNotConfigured",
    "spark-databricks": "DatabricksNotConfigured",
    "spark-databricks-cluster": "DatabricksNotConfigured",
    "support-qwen": "DatabricksNotConfigured",
    "tables-of-unity-catalog": "CredentialsMissing",
    "volumes-of-unity-catalog": "CredentialsMissing",
    "support-chat": "StorageNotConfigured",
    "alpaca-llama-8b": "CredentialsMissing",
}


@cache
def documents(sample: Path) -> list[Json]:
    """The objects of a sample. NB: not to be changed."""
    return parse(sample.read_text(encoding="utf-8"))


KINDS = {kind.KIND: kind for kind in RESOURCES}


def test_the_api_server_accepts_every_sample_and_changes_no_field(plane: Plane) -> None:
    command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "create", "--dry-run=server"]
    command += ["--validate=strict", "--output", "json"]
    command += [word for sample in SAMPLES for word in ("--filename", str(sample))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    written = [document for sample in SAMPLES for document in documents(sample)]
    changes = {
        f"{sample_body['kind']} {sample_body['metadata']['name']}": changed(sample_body, stored_body)
        for sample_body, stored_body in zip(written, objects(done.stdout), strict=True)
    }
    assert {name: changed_fields for name, changed_fields in changes.items() if changed_fields} == {}


@pytest.mark.parametrize("folder", ["gpu", "cpu"])
def test_a_kustomization_is_accepted_on_its_own_device(folder: str, plane: Plane) -> None:
    where = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "apply", "--dry-run=server"]
    done = subprocess.run(
        [*where, "--validate=strict", "--output", "json", "--kustomize", str(FOLDER / folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    job, promotion = sorted(json.loads(done.stdout)["items"], key=lambda item: str(item["kind"]))
    distributed = job["spec"]["distributed"]
    assert (distributed["nodes"], distributed.get("gpusPerNode"), distributed.get("device")) == (
        2,
        *{"gpu": (1, None), "cpu": (None, "CPU")}[folder],
    )
    assert (job["kind"], promotion["kind"]) == ("FineTuneJob", "ModelPromotion")


def test_the_operator_starts_the_jobs_that_need_gpus(world: World, shared_operator: SharedOperator) -> None:
    """No other test runs them: the API server takes all that the operator makes of one, or it waits as its sample says."""
    jobs = [job for job in parts_of("FineTuneJob") if "gpusPerNode" in job["spec"].get("distributed", {})]
    assert len(jobs) > len(WAITS)
    for account in parts_of("ServiceAccount"):
        world.api.create({**account, "metadata": {**account["metadata"], "namespace": world.namespace}})
    for job in jobs:
        world.submit(job)
    names = [job["metadata"]["name"] for job in jobs]
    reasons = {name: started(world, name) for name in names}
    assert {name: reason for name, reason in reasons.items() if reason != "Accepted"} == WAITS
    refused = {name: world.condition(name, "PodsAdmitted") for name in names}
    assert [item for item in refused.values() if item.get("status") == "False"] == []
    # So many jobs at once have a connection each to the MLflow server.
    assert "Connection pool is full" not in shared_operator.log().read_text(encoding="utf-8")


def started(world: World, name: str) -> str:
    """Why a job was accepted, once its first child Job has pods or waits in a queue, or why it is not accepted or not tracked."""

    def reason() -> str | None:
        accepted, tracked = (world.condition(name, kind) for kind in ("Accepted", "Tracked"))
        for condition in (accepted, tracked):
            if condition.get("status") == "False":
                return str(condition["reason"])
        children = world.api.list("Job", world.namespace, f"finetune.dev/job={name}")
        begun = [child for child in children if child["spec"].get("suspend") or child["status"].get("active")]
        return str(accepted["reason"]) if accepted and begun else None

    return wait_for(f"{name} starts", reason, world.patience, instead=lambda: str(world.status(name)))


def objects(text: str) -> list[Json]:
    """What kubectl printed, one object after the other."""
    bodies: list[Json] = []
    while text := text.lstrip():
        body, end = json.JSONDecoder().raw_decode(text)
        bodies.append(body)
        text = text[end:]
    return bodies


def changed(sample_body: object, stored_body: object, where: str = "") -> list[str]:
    """What the API server has made of it beside adding fields, for which Argo CD would call it out of sync.

    A list is compared as a whole, as Argo CD does.
    """
    if isinstance(sample_body, dict) and isinstance(stored_body, dict):
        return [
            field
            for key, value in sample_body.items()
            for field in (
                changed(value, stored_body[key], f"{where}.{key}")
                if key in stored_body
                else [f"{where}.{key}"]
            )
        ]
    return [] if sample_body == stored_body else [f"{where}: {stored_body}"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_operator_reads_all_of_it(sample: Path) -> None:
    """What the models understand, written out again, holds everything the sample says."""
    for part in documents(sample):
        if part["kind"] in KINDS:
            understood = KINDS[part["kind"]].model_validate(part).spec.to_json()
            assert lost(part["spec"], understood, "spec") == []


def lost(sample_body: object, understood: object, where: str) -> list[str]:
    """The fields of `sample_body` that `understood` does not hold."""
    if isinstance(sample_body, dict) and isinstance(understood, dict):
        return [
            field
            for key, value in sample_body.items()
            for field in (
                lost(value, understood[key], f"{where}.{key}") if key in understood else [f"{where}.{key}"]
            )
        ]
    if isinstance(sample_body, list) and isinstance(understood, list) and len(sample_body) == len(understood):
        pairs = enumerate(zip(sample_body, understood, strict=True))
        return [
            field
            for number, (part, understood_part) in pairs
            for field in lost(part, understood_part, f"{where}[{number}]")
        ]
    # The number of a version is text once it was read.
    return [] if understood in (sample_body, str(sample_body)) else [where]


def parts_of(kind: str) -> list[Json]:
    """All objects of a kind among the samples."""
    return [part for sample in SAMPLES for part in documents(sample) if part["kind"] == kind]


def promotions() -> list[ModelPromotionSpec]:
    """The specs of all promotions among the samples."""
    return [ModelPromotion.model_validate(part).spec for part in parts_of("ModelPromotion")]


def test_every_method_and_objective_has_a_sample() -> None:
    specs = [FineTuneJob.model_validate(part).spec for part in parts_of("FineTuneJob")]
    assert {spec.method.type for spec in specs} == set(get_args(MethodType))
    assert {spec.objective.type for spec in specs} == set(get_args(ObjectiveType))


def test_every_source_gate_and_answer_to_drift_has_a_sample() -> None:
    specs = promotions()
    endpoints = [spec.serving for spec in specs if spec.serving]
    canaries = [endpoint.canary for endpoint in endpoints if endpoint.canary]
    gates = [gate for spec in specs for gate in spec.gates]
    gates += [gate for canary in canaries for gate in canary.gates]
    comparisons = [gate.comparison for gate in gates if gate.comparison]
    assert {name for spec in specs for name in spec.source.model_fields_set} == set(Source.model_fields)
    assert {name for gate in gates for name in gate.model_fields_set} == set(Gate.model_fields)
    assert {name for compared in comparisons for name in compared.model_fields_set} == set(
        ComparisonGate.model_fields
    )
    assert {spec.on_drift for spec in specs} == {"Repair", "Warn", "Adopt"}
    assert {spec.on_delete for spec in specs} == {"KeepAlias", "RemoveAlias"}
    assert {name for endpoint in endpoints for name in endpoint.model_fields_set} == set(Serving.model_fields)
    assert {name for endpoint in endpoints for name in endpoint.databricks.model_fields_set} == set(
        DatabricksServing.model_fields
    )


def test_the_pipeline_of_three_aliases_is_one() -> None:
    names = ("quickstart", "quickstart-worse", "promotion-staging", "promotion-champion")
    first, worse, staging, champion = (
        documents(next(path for path in SAMPLES if path.stem == name))[0]["spec"] for name in names
    )
    assert first["register"] == worse["register"] == {"model": staging["model"], "aliases": ["candidate"]}
    assert first["data"]["prepare"]["output"] == worse["data"]["splits"]["path"]
    assert first["training"]["maxLength"] == worse["training"]["maxLength"]
    assert [staging["source"], champion["source"]] == [
        {"type": "Alias", "alias": "candidate"},
        {"type": "Alias", "alias": "staging"},
    ]
    assert staging["model"] == champion["model"]


def test_four_published_ways_are_here() -> None:
    names = {sample.stem for sample in SAMPLES}
    assert {
        "databricks-notebook",
        "air-cli",
        "nemo-recipe",
        "fabric-stack",
        "quickstart",
        "own-script",
        "own-script-accelerate",
        "own-script-deepspeed",
        "own-script-lightning",
    } <= names
