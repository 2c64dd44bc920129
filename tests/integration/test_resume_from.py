"""A job that carries another one on, on a real API server: it waits, says for what, and gives its pods the folder."""

from __future__ import annotations

from typing import Any

import yaml

from fixtures.operator_processes.jobs import error, splits_given
from fixtures.operator_processes.world import World
from support.waiting import wait_for

Json = dict[str, Any]


def test_a_job_waits_for_the_one_that_it_carries_on(world: World) -> None:
    place = {"uri": "/checkpoints", "resumeFrom": {"type": "Job", "name": "first"}}
    world.submit(splits_given("second", checkpoint=place, training={"maxSteps": 200}))
    waits = world.wait_condition("second", "CheckpointFound", "WaitingForJob")
    assert waits["message"].startswith("FineTuneJob first of checkpoint.resumeFrom does not exist: ")
    assert world.condition("second", "Reconciling")["status"] == "True"
    world.submit(splits_given("first"))
    world.run_pods("first-train-1", 2)
    wait_for(
        "the second job sees the first one",
        lambda: "FineTuneJob first still runs" in world.condition("second", "CheckpointFound")["message"],
    )
    assert world.api.get("Job", world.namespace, "second-train-1") is None

    failed = error("ModelNotSupported", "it broke").model_copy(update={"checkpoint_step": 40})
    world.end_pods("first-train-1", [64, 64], [failed, None])
    world.wait_phase("first", "Failed")
    world.wait_pods("second-train-1", 2)
    folder = f"/checkpoints/{world.namespace}-first-{world.job('first')['metadata']['uid'][:8]}"
    assert world.status("second")["resumedFrom"] == {"job": "first", "uri": folder}
    config = world.api.get("ConfigMap", world.namespace, "second-train")
    assert config
    recipe: Json = yaml.safe_load(config["data"]["recipe.yaml"])
    assert recipe["checkpoint"]["resumeFrom"] == {"type": "Uri", "uri": folder}

    world.submit(splits_given("third", checkpoint=place, training={"seed": 7}))
    refused = world.wait_condition("third", "CheckpointFound", "InvalidSpec")
    assert "(training.seed 42 -> 7)" in refused["message"]
    assert world.condition("third", "Stalled")["status"] == "True"
    assert world.condition("third", "Finished")["status"] == "True"
    assert world.condition("third", "Ready")["message"].endswith(
        "; this job has finished: create a FineTuneJob with another name and the correction, or delete this job first"
    )

    after_third = {**place, "resumeFrom": {"type": "Job", "name": "third"}}
    world.submit(splits_given("fourth", checkpoint=after_third, training={"seed": 7}))
    world.wait_phase("fourth", "Failed")
    assert world.condition("fourth", "Finished")["message"].startswith(
        "FineTuneJob third ended before it trained, so it has no checkpoint: remove checkpoint.resumeFrom"
    )
