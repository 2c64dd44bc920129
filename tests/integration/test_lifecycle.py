"""A FineTuneJob from submission to its end, against a real API server and a real MLflow server."""

from __future__ import annotations

from typing import Any

import yaml

from fixtures.operator_processes.jobs import PREPARED, TRAINED, error, job, splits_given
from fixtures.operator_processes.world import OwnWorld, World
from support.waiting import wait_for

Json = dict[str, Any]


def finish_training(world: World, name: str, attempt: int = 1) -> str:
    """Play the trainer: a version is registered and every pod succeeds; the version."""
    run_id = world.status(name)["mlflow"]["runId"]
    version = world.mlflow.register(world.model, run_id)
    world.end_pods(f"{name}-train-{attempt}", [0, 0], [TRAINED, None])
    return version


def check_restored(world: World, kind: str, name: str) -> None:
    """Delete a child of a running step: the operator creates it again, with the same content."""
    before = world.api.get(kind, world.namespace, name)
    assert before is not None
    world.api.delete(kind, world.namespace, name)

    def restored() -> bool:
        after = world.api.get(kind, world.namespace, name)
        return after is not None and after["metadata"]["uid"] != before["metadata"]["uid"]

    wait_for(f"{kind} {name} is there again", restored)
    after = world.api.get(kind, world.namespace, name)
    assert after is not None
    assert after.get("data") == before.get("data")
    if kind == "NetworkPolicy":
        assert after["spec"] == before["spec"]


def check_policy(world: World, name: str, pods: list[Json]) -> None:
    """The job owns its NetworkPolicy, which selects its pods and lets nothing but them connect to them."""
    policy = world.api.get("NetworkPolicy", world.namespace, name)
    assert policy is not None
    uid = world.job(name)["metadata"]["uid"]
    assert [owner["uid"] for owner in policy["metadata"]["ownerReferences"]] == [uid]
    selector = {"matchLabels": {"finetune.dev/job-uid": uid}}
    assert policy["spec"] == {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": selector}]}],
    }
    assert [pod["metadata"]["labels"]["finetune.dev/job-uid"] for pod in pods] == [uid] * len(pods)


def test_a_job_is_prepared_trained_registered_and_done(world: World) -> None:
    world.submit(job())
    world.run_pods("tune-prep", 1)
    world.wait_phase("tune", "Preparing")
    check_restored(world, "ConfigMap", "tune-prep")
    world.end_pods("tune-prep", [0], [PREPARED])

    pods = world.run_pods("tune-train-1", 2)
    status = world.wait_phase("tune", "Training")
    assert status["data"] == {
        "rows": {"train": 900, "validation": 50, "test": 50},
        "tokens": {"train": 90000, "validation": 5000, "test": 5000},
        "path": "/data/splits",
        "version": 7,
    }
    recipe = world.api.get("ConfigMap", world.namespace, "tune-train")
    assert recipe is not None
    assert yaml.safe_load(recipe["data"]["recipe.yaml"])["data"]["splits"] == {
        "type": "Delta",
        "path": "/data/splits",
        "version": 7,
    }
    for kind, name in (("ConfigMap", "tune-train"), ("Service", "tune"), ("NetworkPolicy", "tune")):
        check_restored(world, kind, name)
    check_policy(world, "tune", [*pods])

    run_id = status["mlflow"]["runId"]
    environment = {item["name"]: item.get("value") for item in pods[0]["spec"]["containers"][0]["env"]}
    expected = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "tune-train-1-0.tune",
        "PET_MASTER_PORT": "29500",
        "WORLD_SIZE": "4",
        "MLFLOW_RUN_ID": run_id,
        "MLFLOW_TRACKING_URI": world.mlflow.uri,
        "FINETUNE_RECIPE": "/etc/finetune/recipe.yaml",
        "FINETUNE_ATTEMPT": "1",
    }
    assert {name: environment.get(name) for name in expected} == expected

    world.mlflow.log_metrics(run_id, step=40, max_steps=100, loss=3.25, tokens_per_second=1234.5)
    progress = wait_for("progress", lambda: world.status("tune").get("progress"))
    assert (progress["step"], progress["percent"], progress["loss"]) == (40, 40, 3.25)
    assert world.status("tune")["nodes"] == {"desired": 2, "ready": 2, "summary": "2/2"}

    version = finish_training(world, "tune")
    status = world.wait_phase("tune", "Succeeded")
    assert status["model"] == {
        "name": world.model,
        "version": version,
        "uri": f"models:/{world.model}/{version}",
        "summary": f"{world.model}/{version}",
        "aliases": ["candidate"],
        "baseEvalLoss": 5.0,
        "evalLoss": 2.0,
        "perplexity": 7.389,
    }
    alias = world.mlflow.get("registered-models/alias", name=world.model, alias="candidate")
    assert alias["model_version"]["version"] == version
    world.wait_condition("tune", "Tracked", "RunFinished")
    assert [run["info"]["status"] for run in world.mlflow.runs_of(world.job("tune")["metadata"]["uid"])] == [
        "FINISHED"
    ]


def test_killing_the_operator_at_every_phase_loses_and_repeats_nothing(own_world: OwnWorld) -> None:
    own_world.submit(job())
    own_world.restart()
    own_world.wait_phase("tune", "Preparing")
    own_world.restart()
    own_world.run_pods("tune-prep", 1)
    own_world.operator.kill()
    own_world.end_pods("tune-prep", [0], [PREPARED])
    own_world.operator.start()
    own_world.wait_phase("tune", "Starting")
    own_world.restart()
    own_world.run_pods("tune-train-1", 2)
    own_world.wait_phase("tune", "Training")
    settled = own_world.settle(own_world.operator)
    own_world.restart()
    assert own_world.settle(own_world.operator) == settled
    own_world.operator.kill()
    own_world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    own_world.operator.start()
    own_world.wait_phase("tune", "Registering")
    own_world.restart()
    own_world.mlflow.register(own_world.model, own_world.status("tune")["mlflow"]["runId"])
    own_world.wait_phase("tune", "Succeeded")
    own_world.restart()
    own_world.wait_condition("tune", "Tracked", "RunFinished")
    settled = own_world.settle(own_world.operator)
    own_world.restart()
    assert own_world.settle(own_world.operator) == settled

    uid = own_world.job("tune")["metadata"]["uid"]
    assert len(own_world.mlflow.runs_of(uid)) == 1
    status = own_world.status("tune")
    assert (status["attempt"], status["restarts"], status["phase"]) == (1, 0, "Succeeded")
    jobs = {item["metadata"]["name"] for item in own_world.api.list("Job", own_world.namespace)}
    assert jobs == {"tune-prep", "tune-train-1"}


def test_the_run_of_a_job_that_was_deleted_while_the_operator_was_down_is_closed(own_world: OwnWorld) -> None:
    for name in ("deleted", "kept"):
        own_world.submit(splits_given(name))
        own_world.wait_condition(name, "Tracked", "RunReady")
    uids = {name: own_world.job(name)["metadata"]["uid"] for name in ("deleted", "kept")}
    own_world.operator.kill()
    own_world.api.delete("FineTuneJob", own_world.namespace, "deleted")
    own_world.operator.start()

    def states() -> dict[str, str]:
        return {name: own_world.mlflow.runs_of(uid)[0]["info"]["status"] for name, uid in uids.items()}

    wait_for("the run is closed", lambda: states() == {"deleted": "KILLED", "kept": "RUNNING"})


def test_a_failed_rank_restarts_the_gang_and_exit_75_does_not_count(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.end_pods(
        "tune-train-1", [1, 1], [error("PeerLost", "rank 2 is gone"), error("Boom", "rank 2 blew up")]
    )
    world.run_pods("tune-train-2", 2)
    status = world.wait_phase("tune", "Training")
    assert (status["attempt"], status["restarts"]) == (2, 1)
    assert {key: status["lastFailure"][key] for key in ("exitCode", "reason", "message", "attempt")} == {
        "exitCode": 1,
        "reason": "Boom",
        "message": "rank 2 blew up",
        "attempt": 1,
    }
    world.end_pods("tune-train-2", [75, 75], [None, None])
    world.run_pods("tune-train-3", 2)
    status = world.wait_phase("tune", "Training")
    assert (status["attempt"], status["restarts"]) == (3, 1)
    ends = [(item["attempt"], item["exitCode"], item["message"].split(":")[0]) for item in status["attempts"]]
    assert ends == [
        (1, 1, "rank 2 blew up"),
        (2, 75, "the container ended with exit code 75 and no message"),
    ]
    finish_training(world, "tune", attempt=3)
    world.wait_phase("tune", "Succeeded")


def test_an_attempt_that_runs_out_of_memory_is_followed_by_one_that_uses_less(world: World) -> None:
    world.submit(splits_given(training={"perDeviceBatchSize": 2, "activationCheckpointing": "Full"}))
    lack, peer_lost = (
        error("OutOfMemory", "rank 0 ran out of GPU memory"),
        error("PeerLost", "rank 0 is gone"),
    )
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [1, 1], [lack, peer_lost])
    world.run_pods("tune-train-2", 2)
    smaller = {"perDeviceBatchSize": 1, "gradientAccumulation": 2}
    status = world.wait_phase("tune", "Training")
    assert (status["reducedMemory"], status["restarts"]) == (smaller, 0)
    recipe = world.api.get("ConfigMap", world.namespace, "tune-train")
    assert recipe is not None
    training = yaml.safe_load(recipe["data"]["recipe.yaml"])["training"]
    assert {name: training[name] for name in smaller} == smaller
    assert world.job("tune")["spec"]["training"]["perDeviceBatchSize"] == 2

    world.end_pods("tune-train-2", [1, 1], [lack, peer_lost])
    failed = world.wait_condition("tune", "Failed", "OutOfMemory")
    assert "attempt 2 ran out of GPU memory, and no setting is left that uses less; " in failed["message"]
    status = world.status("tune")
    assert (status["phase"], [item["cause"] for item in status["attempts"]]) == (
        "Failed",
        2 * ["OutOfMemory"],
    )


def test_suspend_stops_the_pods_and_resume_goes_on_with_a_new_attempt(own_world: OwnWorld) -> None:
    own_world.submit(splits_given())
    own_world.run_pods("tune-train-1", 2)
    own_world.wait_phase("tune", "Training")
    own_world.api.patch("FineTuneJob", own_world.namespace, "tune", {"spec": {"suspend": True}})
    own_world.wait_phase("tune", "Suspended")
    own_world.operator.kill()
    own_world.operator.start()
    wait_for("no pods are left", lambda: not own_world.remaining_pods())
    own_world.api.patch("FineTuneJob", own_world.namespace, "tune", {"spec": {"suspend": False}})
    own_world.run_pods("tune-train-2", 2)
    status = own_world.wait_phase("tune", "Training")
    assert (status["attempt"], status["restarts"]) == (2, 0)


def test_deleting_a_job_mid_run_leaves_nothing_and_closes_the_run(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    uid = world.job("tune")["metadata"]["uid"]
    world.api.delete("FineTuneJob", world.namespace, "tune")

    def left() -> list[str]:
        world.remaining_pods()
        selector = f"finetune.dev/job-uid={uid}"
        kinds = ("FineTuneJob", "Job", "Pod", "Service", "ConfigMap", "NetworkPolicy")
        return [
            kind
            for kind in kinds
            if world.api.list(kind, world.namespace, selector if kind != "FineTuneJob" else "")
        ]

    wait_for("nothing is left", lambda: not left())
    wait_for(
        "the run is closed",
        lambda: [run["info"]["status"] for run in world.mlflow.runs_of(uid)] == ["KILLED"],
    )


def test_the_deadline_stops_the_pods(world: World) -> None:
    world.submit(splits_given(runPolicy={"activeDeadlineSeconds": 3}))
    world.run_pods("tune-train-1", 2)
    status = world.wait_phase("tune", "Failed")
    failed = world.condition("tune", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert status["completionTime"]
    wait_for("the pods are gone", lambda: not world.remaining_pods())


def test_children_go_after_their_time_and_are_never_made_again(own_world: OwnWorld) -> None:
    own_world.submit(splits_given(register=None, runPolicy={"ttlSecondsAfterFinished": 1}))
    own_world.run_pods("tune-train-1", 2)
    own_world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    own_world.wait_phase("tune", "Succeeded")

    def left() -> list[str]:
        own_world.remaining_pods()
        selector = "finetune.dev/job=tune"
        return [
            kind
            for kind in ("Job", "Pod", "Service", "ConfigMap", "NetworkPolicy")
            if own_world.api.list(kind, own_world.namespace, selector)
        ]

    wait_for("the children are gone", lambda: not left())
    own_world.operator.kill()
    own_world.operator.start()
    own_world.wait_condition("tune", "Tracked", "RunFinished")
    assert left() == []
    assert own_world.status("tune")["phase"] == "Succeeded"


def test_a_script_of_ones_own_gets_code_and_rendezvous(world: World) -> None:
    trainer = {
        "command": ["torchrun", "my_train.py"],
        "code": {"configMapRef": {"name": "my-code"}},
    }
    world.submit(splits_given(trainer=trainer, pods={"train": {"image": "me/mine:1"}}, register=None))
    pod = world.run_pods("tune-train-1", 2)[0]
    container = pod["spec"]["containers"][0]
    assert (container["image"], container["command"], container["workingDir"]) == (
        "me/mine:1",
        ["torchrun", "my_train.py"],
        "/workspace",
    )
    volumes = {item["name"]: item.get("configMap", {}).get("name") for item in pod["spec"]["volumes"]}
    assert volumes["finetune-code"] == "my-code"
    names = {item["name"] for item in container["env"]}
    assert names >= {
        "PET_NODE_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "MLFLOW_RUN_ID",
    }


def test_a_container_of_a_webhook_keeps_no_job_from_its_end(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    run_id = world.wait_phase("tune", "Training")["mlflow"]["runId"]
    version = world.mlflow.register(world.model, run_id)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None], running_container="istio-proxy")
    status = world.wait_phase("tune", "Succeeded")
    assert (status["model"]["version"], status["model"]["aliases"]) == (version, ["candidate"])
    wait_for("the pods are gone", lambda: not world.remaining_pods())
    assert world.api.get("Job", world.namespace, "tune-train-1") is None
