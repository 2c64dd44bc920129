"""A job whose base is an alias, with a real MLflow server: it waits for the version, and then keeps it."""

from __future__ import annotations

from typing import Any

import yaml

from fixtures.operator_processes.jobs import splits_given
from fixtures.operator_processes.world import World

Json = dict[str, Any]


def test_a_job_waits_for_the_alias_of_its_base_and_keeps_the_version(world: World) -> None:
    base = f"models:/{world.model}@champion"
    world.submit(splits_given("first"))
    world.submit(splits_given("second", model={"base": base}))
    world.wait_condition("second", "ModelsFound", "WaitingForModel")
    world.run_pods("first-train-1", 2)
    run_id = world.wait_phase("first", "Training")["mlflow"]["runId"]
    versions = [world.mlflow.register(world.model, run_id) for _ in range(2)]
    waits = world.wait_condition("second", "ModelsFound", "WaitingForAlias")
    assert waits["message"] == (
        f"the registered model {world.model} has no alias champion: this job starts when a version has this alias"
    )
    assert world.condition("second", "Ready")["reason"] == "WaitingForAlias"
    assert world.condition("second", "Reconciling")["status"] == "True"

    point(world, versions[0])
    world.wait_pods("second-train-1", 2)
    point(world, versions[1])
    assert world.status("second")["pinned"] == {"base": f"models:/{world.model}/{versions[0]}"}
    config = world.api.get("ConfigMap", world.namespace, "second-train")
    assert config
    recipe: Json = yaml.safe_load(config["data"]["recipe.yaml"])
    assert recipe["model"]["base"] == f"models:/{world.model}/{versions[0]}"
    assert world.job("second")["spec"]["model"]["base"] == base


def point(world: World, version: str) -> None:
    """Point the alias champion at a version."""
    alias = {"name": world.model, "alias": "champion", "version": version}
    world.mlflow.post("registered-models/alias", alias)
