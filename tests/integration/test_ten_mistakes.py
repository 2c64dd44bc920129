"""Ten mistakes that people make, each with the sentence that they get, where they look for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_crds import JobReference, Recipe
from finetune_crds.finetunejob import FineTuneJobSpec
from fixtures.operator_processes.jobs import error, job, splits_given
from fixtures.operator_processes.world import World
from integration.schema import dry_run
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator
from support.process import running
from support.refusals import refused

Json = dict[str, Any]

AT_APPLY: dict[str, tuple[Json, str]] = {
    "epochs and maxSteps": (
        job(training={"epochs": 3, "maxSteps": 100}),
        "must not both be set: epochs and maxSteps",
    ),
    "a split of 1.1": (
        job(
            data={
                "source": {"type": "Parquet", "path": "/data/corpus"},
                "prepare": {"output": "/x", "splitRatios": {"train": 0.9, "validation": 0.1, "test": 0.1}},
            }
        ),
        "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
    ),
    "a learning rate that YAML reads as text": (
        job(training={"learningRate": "2e-5"}),
        'spec.training.learningRate in body must be of type number: "string"',
    ),
    "more processes than GPUs": (
        job(distributed={"gpusPerNode": 4, "processesPerNode": 8}),
        "processesPerNode must not be above gpusPerNode, since each process needs its own GPU: lower or remove processesPerNode",
    ),
}


@pytest.mark.parametrize("mistake", AT_APPLY)
def test_kubectl_apply_says(api: Api, mistake: str) -> None:
    body, sentence = AT_APPLY[mistake]
    with refused(sentence):
        dry_run.create(api, body)


def test_a_running_job_cannot_be_edited(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    sentence = (
        "spec.training cannot change once the job exists (only suspend, runPolicy and pods can): create a FineTuneJob with another "
        "name"
    )
    with refused(sentence):
        world.api.patch(
            "FineTuneJob", world.namespace, "tune", {"spec": {"training": {"learningRate": 1e-4}}}
        )


def test_a_large_model_without_a_gpu(world: World) -> None:
    """The pods are played; the sentence is the launcher's."""
    from finetune_trainer.pod.exit_status import RecipeRefusedError
    from finetune_trainer.train.runtime.device import Gpus, check

    body = splits_given(model={"base": "Qwen/Qwen3-8B"})
    recipe = Recipe.of(
        JobReference(name="tune", namespace="team", uid="u"), FineTuneJobSpec.model_validate(body["spec"])
    )
    with pytest.raises(RecipeRefusedError) as raised:
        check(recipe, 2, Gpus(0), lambda: 8_190_735_360)
    sentence = str(raised.value)
    assert sentence == (
        "model.base Qwen/Qwen3-8B has 8.2 billion parameters and the pod sees no GPU: set distributed.gpusPerNode, or "
        "distributed.device: CPU to train it on CPUs"
    )
    world.submit(body)
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [64, 64], [error("NoGpu", sentence)] * 2)
    world.wait_phase("tune", "Failed")
    assert sentence in world.condition("tune", "Ready")["message"]


def test_a_token_of_the_hub_on_the_trainer_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The preparation counts tokens with the model's tokenizer, and has no token: the sentence is its own."""
    import httpx2
    from huggingface_hub.errors import GatedRepoError

    from finetune_trainer.models import download
    from finetune_trainer.pod.exit_status import RecipeRefusedError

    def gated(*_: object, **__: object) -> Path:
        request = httpx2.Request("GET", "https://hub")
        raise GatedRepoError("403", response=httpx2.Response(403, request=request))

    monkeypatch.setattr(download, "_download_snapshot", gated)
    with pytest.raises(RecipeRefusedError) as raised:
        download.fetch_tokenizer("meta-llama/Llama-3.1-8B", tmp_path)
    sentence = str(raised.value)
    assert sentence == (
        "model.base meta-llama/Llama-3.1-8B is gated: accept the model's terms on the Hub, and name a Secret with "
        "HF_TOKEN in spec.pods.all.envFrom, which applies to all pods"
    )
    world.submit(job(pods={"train": {"envFrom": [{"secretRef": {"name": "hub"}}]}}))
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [64], [error("ModelForbidden", sentence)])
    world.wait_phase("tune", "Failed")
    assert sentence in world.condition("tune", "Ready")["message"]


def test_a_wrong_queue(world: World) -> None:
    world.submit(splits_given(runPolicy={"queueName": "reserch"}))
    world.wait_condition("tune", "Trained", "QueueInadmissible")
    sentence = "because queue reserch has not admitted Job tune-train-1"
    assert sentence in world.condition("tune", "Ready")["message"]


def test_a_wrong_queue_is_told_before_the_preparation_and_its_removal_counts(world: World) -> None:
    world.submit(job(runPolicy={"queueName": "reserch"}))
    condition = world.wait_condition("tune", "PodsAdmitted", "QueueInadmissible")
    sentence = (
        "queue reserch cannot admit the job, because Kueue is not installed in this cluster: correct or remove spec.runPolicy.queueName, "
        "or create the LocalQueue, and the job continues"
    )
    assert (condition["message"], world.condition("tune", "Ready")["message"]) == (sentence, sentence)
    assert world.condition("tune", "Reconciling")["status"] == "True"
    assert world.api.list("Job", world.namespace) == []
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"runPolicy": {"queueName": ""}}})
    world.wait_condition("tune", "Prepared", "Preparing")


def test_registering_without_a_server(api: Api, kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    settings = {"FINETUNE_NAMESPACES": namespace, "FINETUNE_POLL_SECONDS": "1"}
    with running(forked_operator(kubeconfig, tmp_path / "operator.log", settings)):
        world = World(api, Mlflow(tmp_path), namespace)
        world.submit(splits_given())
        condition = world.wait_condition("tune", "Accepted", "MlflowNotConfigured")
    assert condition["message"] == (
        "spec.register requires an MLflow server: install the chart with tracking.uri, or create a FineTuneJob "
        "with another name and spec.tracking.uri"
    )
    assert world.condition("tune", "Ready")["message"] == condition["message"]


def test_resource_for_resources(world: World) -> None:
    container = {"name": "main", "resource": {"limits": {"nvidia.com/gpu": "1"}}}
    world.submit(job(pods={"train": {"template": {"spec": {"containers": [container]}}}}))
    condition = world.wait_condition("tune", "PodsAdmitted", "PodTemplateInvalid")
    assert 'unknown field "spec.template.spec.containers[0].resource"' in condition["message"]
    assert "correct spec.pods.train, and the job continues" in condition["message"]
    assert world.api.list("Job", world.namespace) == []
