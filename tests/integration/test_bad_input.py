"""Bad input is refused in a sentence, at the earliest place that can know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError

from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.ports import free_port
from support.process import running
from support.waiting import wait_for
from worlds.processes.jobs import PREPARED, TRAINED, error, job, splits_given
from worlds.processes.world import World

Json = dict[str, Any]


def prepared(columns: Json | None = None, **fields: Any) -> Json:
    """spec.data with fields of prepare replaced."""
    return {
        "source": {"type": "Parquet", "path": "/data/corpus"},
        "columns": columns or {"type": "Text"},
        "prepare": {"output": "/data/splits", **fields},
    }


def found(**fields: Any) -> Json:
    """The same without columns."""
    return {name: part for name, part in prepared(**fields).items() if name != "columns"}


PREFERENCES: Json = {"type": "Preference", "prompt": "p", "chosen": "c", "rejected": "r"}
NO_PACKS: Json = {"packing": False}
DPO: Json = {"type": "DPO"}
DISTILLATION: Json = {"type": "Distillation", "distillation": {"teacher": "/models/teacher"}}


REFUSED_BY_THE_SCHEMA: dict[str, tuple[Json, str]] = {
    "unknown method": (job(method={"type": "Magic"}), 'spec.method.type: Unsupported value: "Magic"'),
    "nodes 0": (job(distributed={"nodes": 0}), "spec.distributed.nodes: Invalid value: 0"),
    "split does not add up": (
        job(data=prepared(splitRatios={"train": 0.8, "validation": 0.1, "test": 0.2})),
        "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
    ),
    "epochs and maxSteps": (
        job(training={"epochs": 1, "maxSteps": 10}),
        "set epochs or maxSteps, not both",
    ),
    "reserved environment": (
        job(trainer={"env": [{"name": "MASTER_ADDR", "value": "me"}]}),
        "the operator sets MASTER_ADDR (rendezvous, MLflow run, recipe): remove it",
    ),
    "reserved environment in nccl": (
        job(distributed={"nccl": {"WORLD_SIZE": "2"}}),
        "the operator sets these variables itself",
    ),
    "name too long": (job("a" * 41), "metadata.name becomes part of host names: at most 40 characters"),
    "name with a dot": (job("a.b"), "metadata.name becomes part of host names"),
    "name that starts with a digit": (job("7b-sft"), "a letter first, no dots"),
    "args without command": (job(trainer={"args": ["--fast"]}), "trainer.args needs trainer.command"),
    "revision of a path": (
        job(model={"base": "/models/base", "revision": "main"}),
        "revision applies to Hub models only",
    ),
    "no answer to take the loss on": (
        job(data=prepared(promptTemplate="{text}"), objective={"lossOn": "Answer"}),
        "objective.lossOn Answer needs data.prepare.responseTemplate",
    ),
    "source and splits": (
        job(data={**prepared(), "splits": {"type": "Delta", "path": "/x"}}),
        "set either source (with prepare) or splits",
    ),
    "lora without LoRA": (job(method={"lora": {"rank": 8}}), "lora needs type LoRA, QLoRA or DoRA"),
    "no type of columns": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"prompt": "p"}}),
        "spec.data.columns.type: Required value",
    ),
    "a column of another type": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"type": "Text", "prompt": "p"}}),
        "prompt needs type PromptResponse or Preference",
    ),
    "a preparation of splits": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "prepare": {"output": "/y"}}),
        "prepare needs source: prepared splits are read as they are",
    ),
    "more processes than GPUs": (
        job(distributed={"gpusPerNode": 4, "processesPerNode": 8}),
        "processesPerNode is above gpusPerNode, and each process needs a GPU of its own: lower it, or remove it",
    ),
    "GPUs for the CPU": (
        job(distributed={"gpusPerNode": 4, "device": "CPU"}),
        "device: CPU uses no GPU: remove gpusPerNode",
    ),
    "a product without GPUs": (
        job(distributed={"gpu": {"product": "A100"}}),
        "gpu describes the GPUs of gpusPerNode: set that too",
    ),
    "a product of another maker": (
        job(distributed={"gpusPerNode": 1, "gpu": {"resourceName": "amd.com/gpu", "product": "MI300X"}}),
        "product is a label that NVIDIA's GPU feature discovery sets",
    ),
    "reserved alias": (
        job(register={"model": "m", "aliases": ["v3"]}),
        "MLflow reserves the aliases latest and v<number>: choose another",
    ),
    "code without command": (
        job(trainer={"code": {"configMapRef": {"name": "c"}}}),
        "trainer.code needs trainer.command",
    ),
    "packing with virtual tokens": (
        job(method={"type": "PromptTuning"}),
        "virtual tokens are lost under packing and activation checkpointing: set training.packing: false",
    ),
    "activation checkpointing with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"activationCheckpointing": "Auto"}),
        "virtual tokens are lost under packing and activation checkpointing",
    ),
    "compiled layers with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"compile": True}),
        "virtual tokens do not work with compiled layers: set training.compile: false",
    ),
    "a prefix that starts from a text": (
        job(method={"type": "PrefixTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS),
        "softPrompt.initText needs type PromptTuning",
    ),
    "a soft prompt for LoRA": (
        job(method={"type": "LoRA", "softPrompt": {"virtualTokens": 8}}),
        "softPrompt needs type PrefixTuning or PromptTuning",
    ),
    "quantization without QLoRA": (
        job(method={"type": "LoRA", "quantization": {"type": "NF4"}}),
        "quantization needs type QLoRA",
    ),
    "merging a soft prompt": (
        job(method={"type": "PromptTuning", "export": "Merged"}, training=NO_PACKS),
        "export: Merged needs type LoRA, QLoRA or DoRA",
    ),
    **{
        f"{objective['type']} with {method}": (
            job(
                method={"type": method},
                objective=objective,
                training=NO_PACKS,
                data=prepared(columns=PREFERENCES) if objective is DPO else prepared(),
            ),
            sentence,
        )
        for objective, methods, sentence in (
            (DPO, ("PrefixTuning", "PromptTuning"), "DPO works with method Full, LoRA, QLoRA or DoRA"),
            (
                DISTILLATION,
                ("QLoRA", "PrefixTuning", "PromptTuning"),
                "Distillation works with method Full, LoRA or DoRA",
            ),
        )
        for method in methods
    },
    "DPO without preferences": (
        job(objective=DPO),
        "objective DPO needs data.columns of type Preference",
    ),
    "preferences without DPO": (
        job(data=prepared(columns=PREFERENCES)),
        "data.columns of type Preference needs objective.type DPO",
    ),
    "a teacher without Distillation": (
        job(objective={"distillation": {"teacher": "/t"}}),
        "distillation and type Distillation require each other",
    ),
    "no teacher": (
        job(objective={"type": "Distillation"}),
        "distillation and type Distillation require each other",
    ),
    "a loss on the answer for DPO": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"lossOn": "All"}),
        "lossOn needs type SFT",
    ),
    "a loss on the answer of a text": (
        job(data=prepared(), objective={"lossOn": "Answer"}),
        "a text has no answer",
    ),
    "a template of both answers": (
        job(
            data=prepared(columns=PREFERENCES, promptTemplate="{p}", responseTemplate="{c}"),
            objective=DPO,
        ),
        "prepare.responseTemplate cannot be used with columns of type Preference",
    ),
    "a template of conversations": (
        job(data=prepared(columns={"type": "Messages", "messages": "m"}, promptTemplate="{m}")),
        "prepare.promptTemplate cannot be used with columns of type Messages",
    ),
    "output over the source": (
        job(data=prepared(output="/data/corpus")),
        "prepare.output is the source itself",
    ),
    "the best of no evaluations": (
        job(training={"select": "Best"}),
        "select: Best needs evaluations during training: set training.evalEverySteps",
    ),
    "the best without checkpoints": (
        job(training={"select": "Best", "evalEverySteps": 5}, checkpoint=None),
        "training.select: Best keeps the best checkpoint: set checkpoint",
    ),
    "stopping early without evaluations": (
        job(training={"earlyStopping": {}}),
        "earlyStopping needs evaluations during training: set training.evalEverySteps",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_THE_SCHEMA)
def test_the_schema_refuses(api: Api, namespace: str, case: str) -> None:
    body, sentence = REFUSED_BY_THE_SCHEMA[case]
    body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    with pytest.raises(DynamicApiError) as refusal:
        api.create(body)
    assert sentence in refusal.value.summary()


TAKEN_BY_THE_SCHEMA: dict[str, Json] = {
    **{method: job(method={"type": method}) for method in ("Full", "LoRA", "QLoRA", "DoRA")},
    **{
        method: job(method={"type": method, "softPrompt": {"virtualTokens": 8}}, training=NO_PACKS)
        for method in ("PrefixTuning", "PromptTuning")
    },
    "a prompt that starts from a text": job(
        method={"type": "PromptTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS
    ),
    "DPO": job(data=prepared(columns=PREFERENCES, promptTemplate="Q: {p}"), objective=DPO),
    "columns that are found in the data": job(data=found()),
    "preferences that are found in the data": job(data=found(promptTemplate="Q: {prompt}"), objective=DPO),
    "an answer in columns that are found": job(
        data={"splits": {"type": "Delta", "path": "/x"}}, objective={"lossOn": "Answer"}
    ),
    "models on a claim, on CPUs": job(
        model={"base": "org/base", "cache": {"claimName": "models"}}, distributed={"device": "CPU"}
    ),
    "DPO with QLoRA": job(
        data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"beta": 0.2}}, method={"type": "QLoRA"}
    ),
    "Distillation with DoRA": job(objective=DISTILLATION, method={"type": "DoRA"}),
    "the answer of a templated text": job(
        data=prepared(promptTemplate="{title}", responseTemplate="{text}"), objective={"lossOn": "Answer"}
    ),
    "the best of some": job(
        training={"select": "Best", "evalEverySteps": 5, "earlyStopping": {"patience": 2}}
    ),
    "all of the speed": job(
        training={"compile": True, "activationCheckpointing": "Auto"},
        distributed={"strategy": "HSDP", "nodes": 2, "processesPerNode": 2},
        tracking={"systemMetrics": True},
    ),
}


@pytest.mark.parametrize("case", TAKEN_BY_THE_SCHEMA)
def test_the_schema_takes(api: Api, namespace: str, case: str) -> None:
    body = TAKEN_BY_THE_SCHEMA[case]
    assert api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


CHANGES: dict[str, tuple[Json, str | None]] = {
    "training": ({"training": {"seed": 7}}, "spec.training cannot change once the job exists"),
    "a part that was not there": ({"checkpoint": {"uri": "/other"}}, "spec.checkpoint cannot change"),
    "a part taken away": ({"register": None}, "spec.register cannot change"),
    "suspend": ({"suspend": True}, None),
    "runPolicy": ({"runPolicy": {"maxRestarts": 9}}, None),
    "podTemplate": ({"podTemplate": {"spec": {"nodeSelector": {"pool": "spare"}}}}, None),
    "credentials": (
        {"envFrom": [{"secretRef": {"name": "new"}}], "env": [{"name": "A", "value": "b"}]},
        None,
    ),
    "the image and variables of a part": (
        {
            "trainer": {"image": "me/mine:2", "env": [{"name": "A", "value": "b"}]},
            "data": {
                "prepare": {"image": "me/mine:2", "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}
            },
        },
        None,
    ),
    "a command": ({"trainer": {"command": ["mine"]}}, "spec.trainer.command cannot change"),
    "a filter": ({"data": {"prepare": {"filter": "a = 1"}}}, "spec.data.prepare.filter cannot change"),
    "the source": ({"data": {"source": {"path": "/other"}}}, "spec.data.source cannot change"),
    "no preparation": ({"data": {"prepare": None}}, "spec.data.prepare cannot change"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_spec_is_immutable_but_for_what_the_next_attempt_can_take_up(
    api: Api, namespace: str, case: str
) -> None:
    change, sentence = CHANGES[case]
    body = job()
    api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})
    if sentence is None:
        assert api.patch("FineTuneJob", namespace, "tune", {"spec": change})
        return
    with pytest.raises(DynamicApiError) as refusal:
        api.patch("FineTuneJob", namespace, "tune", {"spec": change})
    assert sentence in refusal.value.summary()


def test_a_wrong_recipe_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(splits_given())
    sentence = "model.base /models/base does not exist in the pod: mount the volume in podTemplate"
    world.run_pods("tune-train-1", 2)
    world.end_pods(
        "tune-train-1", [64, 64], [error("ModelNotFound", sentence), error("ModelNotFound", sentence)]
    )
    status = world.wait_phase("tune", "Failed")
    assert status["restarts"] == 0
    assert {key: status["lastFailure"][key] for key in ("exitCode", "reason", "message", "attempt")} == {
        "exitCode": 64,
        "reason": "ModelNotFound",
        "message": sentence,
        "attempt": 1,
    }
    failed = world.condition("tune", "Failed")
    assert failed["reason"] == "RecipeWrong"
    assert sentence in failed["message"]
    assert [job["metadata"]["name"] for job in world.api.list("Job", world.namespace)] == ["tune-train-1"]
    wait_for("a Warning Event", lambda: world.events("RecipeWrong"))
    world.wait_condition("tune", "Tracked", "RunFinished")
    runs = world.mlflow.runs_of(world.job("tune")["metadata"]["uid"])
    assert [run["info"]["status"] for run in runs] == ["FAILED"]


def test_wrong_data_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(job())
    sentence = "the source /data/corpus has no column answer; it has: question, reply"
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [65], [error("MissingColumn", sentence)])
    status = world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "DataWrong"
    assert (status["lastFailure"]["exitCode"], status["lastFailure"]["message"]) == (65, sentence)


def test_what_is_not_implemented_is_refused_by_name(world: World) -> None:
    world.submit(job(data=prepared(dedupe={"near": {}}, spark={"mode": "Kubernetes"})))
    world.wait_phase("tune", "Failed")
    accepted = world.condition("tune", "Accepted")
    assert accepted["reason"] == "NotImplemented"
    assert "data.prepare.spark.mode Kubernetes (use Local)" in accepted["message"]
    assert "data.prepare.dedupe.near" in accepted["message"]
    assert world.api.list("Job", world.namespace) == []


def test_reserved_environment_in_a_pod_template_is_refused(world: World) -> None:
    containers = [{"name": "trainer", "env": [{"name": "WORLD_SIZE", "value": "1"}]}]
    world.submit(splits_given(podTemplate={"spec": {"containers": containers}}))
    world.wait_phase("tune", "Failed")
    message = "spec.podTemplate sets WORLD_SIZE, which the operator sets: remove it"
    assert world.condition("tune", "Accepted")["message"] == message


def test_pods_that_cannot_run_are_named_with_the_reason(world: World) -> None:
    world.submit(splits_given())
    first, second = world.wait_pods("tune-train-1", 2)
    world.set_waiting(second, "ImagePullBackOff", 'Back-off pulling image "nowhere/none:1"')
    found = world.wait_condition("tune", "PodsHealthy", "ImagePullFailed")
    assert second["metadata"]["name"] in found["message"]
    assert "nowhere/none:1" in found["message"]
    waiting = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes: no GPU",
    }
    meta = first["metadata"]
    world.api.patch(
        "Pod", meta["namespace"], meta["name"], {"status": {"conditions": [waiting]}}, status=True
    )
    found = world.wait_condition("tune", "PodsHealthy", "Unschedulable")
    assert found["message"].startswith(f"pod {meta['name']} cannot be scheduled: 0/2 nodes: no GPU")


def test_pods_that_the_api_server_rejects_are_explained(world: World) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": world.namespace},
        "spec": {"hard": {"pods": "0"}},
    }
    world.api.create(quota)
    wait_for(
        "the quota counts",
        lambda: (world.api.get("ResourceQuota", world.namespace, "none") or {}).get("status", {}).get("hard"),
    )
    world.submit(splits_given())
    found = world.wait_condition("tune", "PodsHealthy", "PodRejected")
    assert "exceeded quota: none" in found["message"]


def test_a_child_name_that_is_taken_is_said(world: World) -> None:
    world.api.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "tune", "namespace": world.namespace},
            "spec": {"ports": [{"port": 80}]},
        }
    )
    world.submit(splits_given())
    found = world.wait_condition("tune", "PodsHealthy", "NameTaken")
    assert found["message"].startswith("Service tune exists and belongs to something else")
    world.api.delete("Service", world.namespace, "tune")
    world.run_pods("tune-train-1", 2)


def test_a_script_that_registers_nothing_is_told_so(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "RegistrationFailed"


def test_mlflow_away_at_the_start_is_waited_for_and_away_later_stops_nothing(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path)
    operator = operator_process(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(operator):
        world = World(api, server, namespace)
        world.submit(job())
        world.run_pods("tune-prep", 1)
        world.end_pods("tune-prep", [0], [PREPARED])
        found = world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert found["message"].startswith(f"MLflow at {server.uri} cannot be reached")
        waiting = world.wait_condition("tune", "Trained", "Starting")
        assert waiting["message"].startswith("training waits for MLflow")
        with running(server):
            world.run_pods("tune-train-1", 2)
            world.wait_condition("tune", "Tracked", "RunReady")
            run_id = world.status("tune")["mlflow"]["runId"]
        world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert world.wait_phase("tune", "Training")["attempt"] == 1
        with running(server):
            server.register(world.model, run_id)
            world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
            world.wait_phase("tune", "Succeeded")


def test_mlflow_that_refuses_its_host_name_says_what_to_set(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path, allowed_hosts="mlflow.example.org")
    operator = operator_process(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(server), running(operator):
        world = World(api, server, namespace)
        world.submit(splits_given())
        found = world.wait_condition("tune", "Tracked", "MlflowHostNotAllowed")
        assert f"--allowed-hosts '127.0.0.1:{server.port}'" in found["message"]


def test_a_missing_tracking_secret_is_named(world: World) -> None:
    tracking = {"uri": f"http://127.0.0.1:{free_port()}", "secretRef": {"name": "absent"}}
    world.submit(splits_given(tracking=tracking))
    found = world.wait_condition("tune", "Tracked", "CredentialsMissing")
    assert found["message"].startswith("Secret absent of spec.tracking.secretRef does not exist")
