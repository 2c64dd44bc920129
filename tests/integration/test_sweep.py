"""A sweep on a real API server and a real MLflow server; the test plays the pods of its trials."""

from __future__ import annotations

from typing import Any

from finetune_crds.contract import TerminationMessage, TrainResult
from fixtures.operator_processes.jobs import PREPARED, error, job, splits_given
from fixtures.operator_processes.world import OwnWorld, World
from support.waiting import wait_for

Json = dict[str, Any]
ONE_POD: Json = {"nodes": 1, "processesPerNode": 1}
RATES = [1e-4, 2e-4, 3e-4]
GRID: Json = {
    "algorithm": "Grid",
    "parallel": 2,
    "maxFailedTrials": 1,
    "parameters": [{"field": "training.learningRate", "values": RATES}],
}
POLICY: Json = {"maxRestarts": 0}


def trained(loss: float) -> TerminationMessage:
    """What rank 0 of a trial leaves."""
    return TerminationMessage(train=TrainResult(step=10, eval_loss=loss))


def run_tags(world: World, name: str) -> dict[str, str]:
    (run,) = world.mlflow.runs_of(world.job(name)["metadata"]["uid"])
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


def test_a_sweep_from_its_preparation_to_the_registered_model(world: World) -> None:
    world.submit(job(distributed=ONE_POD, sweep=GRID, runPolicy=POLICY))
    # One of the two first trials prepares, and the other one waits for it.
    lease = wait_for("a Lease", lambda: world.api.list("Lease", world.namespace))[0]
    first, second = sorted(("tune-1", "tune-2"), key=lambda name: name != lease["spec"]["holderIdentity"])
    world.run_pods(f"{first}-prep", 1)
    world.wait_condition(second, "Prepared", "WaitingForPreparation")
    world.wait_phase("tune", "Preparing")
    assert world.api.get("FineTuneJob", world.namespace, "tune-3") is None
    world.end_pods(f"{first}-prep", [0], [PREPARED])
    world.run_pods("tune-1-train-1", 1)
    status = world.wait_phase("tune", "Training")
    assert status["data"]["path"] == "/data/splits"
    run_id = status["mlflow"]["runId"]
    assert [run_tags(world, name).get("mlflow.parentRunId") for name in ("tune", "tune-1", "tune-2")] == [
        None,
        run_id,
        run_id,
    ]

    world.end_pods("tune-1-train-1", [64], [error("Boom", "no such layer")])
    world.end_pods("tune-2-train-1", [0], [trained(2.5)])
    wait_for("a best trial", lambda: world.status("tune")["progress"].get("summary") == "2/3, best 2.5")
    world.end_pods("tune-3-train-1", [0], [trained(2.25)])

    # The last job continues from the best trial and registers the model.
    world.run_pods("tune-best-train-1", 1)
    # The other trials, and the last job, use its table without pods of their own.
    jobs = [item["metadata"]["name"] for item in world.api.list("Job", world.namespace)]
    assert [name for name in jobs if name.endswith("-prep")] == [f"{first}-prep"]
    last = world.job("tune-best")
    assert (last["spec"]["training"]["learningRate"], last["status"]["resumedFrom"]["job"]) == (
        3e-4,
        "tune-3",
    )
    version = world.mlflow.register(world.model, world.status("tune-best")["mlflow"]["runId"])
    world.end_pods("tune-best-train-1", [0], [trained(2.25)])
    status = world.wait_phase("tune", "Succeeded")
    assert status["sweep"] == {
        "best": 3,
        "planned": 3,
        "trials": [
            {"n": 1, "parameters": {"training.learningRate": "0.0001"}, "phase": "Failed"},
            {
                "n": 2,
                "parameters": {"training.learningRate": "0.0002"},
                "metric": 2.5,
                "phase": "Succeeded",
            },
            {
                "n": 3,
                "parameters": {"training.learningRate": "0.0003"},
                "metric": 2.25,
                "phase": "Succeeded",
            },
        ],
    }
    model = status["model"]
    assert (model["name"], model["version"], model["aliases"]) == (world.model, version, ["candidate"])
    assert world.condition("tune", "Finished")["status"] == "True"
    world.wait_condition("tune", "Tracked", "RunFinished")

    world.api.delete("FineTuneJob", world.namespace, "tune")
    wait_for("no FineTuneJob", lambda: not world.api.list("FineTuneJob", world.namespace))


def test_suspending_and_correcting_a_sweep_reaches_its_trials(world: World) -> None:
    world.submit(splits_given(distributed=ONE_POD, sweep=GRID, register=None))
    for number in (1, 2):
        world.run_pods(f"tune-{number}-train-1", 1)
    world.wait_phase("tune", "Training")
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": True}})
    wait_for("the pods are stopped", lambda: not world.remaining_pods())
    wait_for(
        "all are suspended",
        lambda: "every trial is suspended" in world.condition("tune", "Suspended")["message"],
    )
    assert {world.status(f"tune-{number}")["phase"] for number in (1, 2)} == {"Suspended"}
    pods = {"all": {"serviceAccountName": "default"}}
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": False, "pods": pods}})
    for number in (1, 2):
        (pod,) = world.run_pods(f"tune-{number}-train-2", 1)
        assert pod["spec"]["serviceAccountName"] == "default"
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"pods": None}})
    wait_for(
        "the trials follow",
        lambda: [world.job(f"tune-{number}")["spec"].get("pods", {}) for number in (1, 2)] == [{}, {}],
    )


def test_an_invalid_trial_is_named_before_one_starts(world: World) -> None:
    nodes = {"field": "distributed.nodes", "values": [1, 0]}
    world.submit(splits_given(sweep={"algorithm": "Grid", "parameters": [nodes]}))
    world.wait_phase("tune", "Failed")
    failed = world.condition("tune", "Failed")
    assert failed["reason"] == "InvalidSpec"
    assert (
        "a trial of spec.sweep is invalid: the API server would reject FineTuneJob tune-2: "
        in failed["message"]
    )
    assert "spec.distributed.nodes" in failed["message"]
    assert len(world.api.list("FineTuneJob", world.namespace)) == 1


def test_64_trials_start_in_order_and_once_though_the_operator_is_killed(own_world: OwnWorld) -> None:
    seeds = {"field": "training.seed", "range": {"min": 1, "max": 64, "step": 1}}
    sweep = {"algorithm": "Grid", "parallel": 16, "parameters": [seeds]}
    own_world.submit(splits_given(distributed=ONE_POD, sweep=sweep, register=None))
    for number in range(1, 65):
        if number % 16 == 8:
            own_world.restart()
        own_world.end_pods(f"tune-{number}-train-1", [0], [trained(number / 64)])
    status = own_world.wait_phase("tune", "Succeeded")
    assert [(item["n"], item["parameters"]["training.seed"]) for item in status["sweep"]["trials"]] == [
        (number, str(number)) for number in range(1, 65)
    ]
    assert (status["sweep"]["best"], status["progress"]["summary"]) == (1, "64/64, best 0.0156")
    created = [item["metadata"] for item in own_world.api.list("FineTuneJob", own_world.namespace)]
    assert len(created) == 65
    jobs = {item["metadata"]["name"] for item in own_world.api.list("Job", own_world.namespace)}
    assert jobs == {f"tune-{number}-train-1" for number in range(1, 65)}
    runs = {
        item["info"]["run_id"]
        for number in range(1, 65)
        for item in own_world.mlflow.runs_of(uid_of(own_world, number))
    }
    assert len(runs) == 64


def uid_of(world: World, number: int) -> str:
    return str(world.job(f"tune-{number}")["metadata"]["uid"])


def test_tpe_chooses_values_from_earlier_trials(world: World) -> None:
    interval: Json = {"min": 1e-5, "max": 1e-3, "scale": "Log"}
    rate = {"field": "training.learningRate", "range": interval}
    sweep = {"algorithm": "TPE", "trials": 4, "parameters": [rate]}
    world.submit(splits_given(distributed=ONE_POD, sweep=sweep, register=None))
    for number in range(1, 5):
        world.end_pods(f"tune-{number}-train-1", [0], [trained(number / 4)])
    status = world.wait_phase("tune", "Succeeded")
    recorded = [float(item["parameters"]["training.learningRate"]) for item in status["sweep"]["trials"]]
    specs = [world.job(f"tune-{number}")["spec"]["training"]["learningRate"] for number in range(1, 5)]
    assert (specs, len(set(recorded))) == (recorded, 4)
    assert all(interval["min"] <= value <= interval["max"] for value in recorded)


def reach(world: World, number: int, step: int, loss: float) -> None:
    """Let a trial report a step and its loss there, as its rank 0 does, and later losses that do not count."""
    run_id = world.status(f"tune-{number}")["mlflow"]["runId"]
    reported = {"step": (step, step), "eval_loss": (loss, step)}
    for name, (value, at) in reported.items():
        entry = {"key": name, "value": value, "timestamp": 1000 + at, "step": at}
        world.mlflow.post("runs/log-batch", {"run_id": run_id, "metrics": [entry]})


def test_asha_suspends_trials_at_a_rung_and_resumes_the_best(world: World) -> None:
    seeds = {"field": "training.seed", "range": {"min": 1, "max": 1000}}
    sweep = {"algorithm": "ASHA", "trials": 3, "parallel": 2, "rungs": [10], "parameters": [seeds]}
    training = {"evalEverySteps": 5, "maxSteps": 30}
    world.submit(splits_given(distributed=ONE_POD, sweep=sweep, training=training, register=None))
    for number in (1, 2):
        world.run_pods(f"tune-{number}-train-1", 1)
    reach(world, 1, 10, 0.5)
    # The loss at the rung counts, and not the one that the run has last.
    reach(world, 2, 10, 0.7)
    reach(world, 2, 15, 0.1)
    world.run_pods("tune-3-train-1", 1)
    for number in (1, 2):
        world.wait_phase(f"tune-{number}", "Suspended")
    reach(world, 3, 10, 0.9)
    world.end_pods("tune-1-train-2", [0], [trained(0.4)])
    status = world.wait_phase("tune", "Succeeded")
    trials = [
        {name: item.get(name) for name in ("n", "metric", "phase", "rungs", "promotions")}
        for item in status["sweep"]["trials"]
    ]
    assert trials == [
        {
            "n": 1,
            "metric": 0.4,
            "phase": "Succeeded",
            "rungs": [{"step": 10, "metric": 0.5}],
            "promotions": 1,
        },
        {
            "n": 2,
            "metric": None,
            "phase": "Suspended",
            "rungs": [{"step": 10, "metric": 0.7}],
            "promotions": 0,
        },
        {
            "n": 3,
            "metric": None,
            "phase": "Suspended",
            "rungs": [{"step": 10, "metric": 0.9}],
            "promotions": 0,
        },
    ]
    assert status["progress"]["summary"] == "3/3, best 0.4"
    wait_for(
        "the trials at the rung are deleted",
        lambda: (
            {item["metadata"]["name"] for item in world.api.list("FineTuneJob", world.namespace)}
            == {"tune", "tune-1"}
        ),
    )
