"""An operator that was rolled back below a value in use leaves the job alone, and goes on once it can read it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes.dynamic.exceptions import UnprocessibleEntityError

from fixtures.operator_processes.jobs import TRAINED, splits_given
from fixtures.operator_processes.world import World
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]
CRD = "finetunejobs.finetune.dev"


@contextmanager
def a_newer_schema(api: Api) -> Iterator[None]:
    """The API server accepts runPolicy.maxRestarts: -1, which this version of the operator cannot read."""
    crd = api.get("CustomResourceDefinition", "", CRD)
    assert crd is not None
    versions = crd["spec"]["versions"]
    newer = copy.deepcopy(versions)
    spec = newer[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["runPolicy"]["properties"]["maxRestarts"]["minimum"] = -1
    api.patch("CustomResourceDefinition", "", CRD, {"spec": {"versions": newer}})
    try:
        yield
    finally:
        api.patch("CustomResourceDefinition", "", CRD, {"spec": {"versions": versions}})


def set_restarts(world: World, count: int) -> bool:
    """Whether the API server accepts it: it takes a moment to serve a new schema."""
    try:
        body = {"spec": {"runPolicy": {"maxRestarts": count}}}
        world.api.patch("FineTuneJob", world.namespace, "tune", body)
    except UnprocessibleEntityError:
        return False
    return True


def test_a_job_goes_on_when_its_spec_can_be_read_again(world: World) -> None:
    world.submit(splits_given(register=None))
    before = world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    with a_newer_schema(world.api):
        wait_for("the newer schema is served", lambda: set_restarts(world, -1))
        world.wait_condition("tune", "Accepted", "SpecUnreadable")
        assert world.condition("tune", "Accepted")["status"] == "Unknown"
        assert world.condition("tune", "Accepted")["message"].startswith(
            "this version of the operator cannot read the spec (spec.runPolicy.maxRestarts: "
        )
        assert world.status("tune")["phase"] == "Training"
        assert set_restarts(world, 1)
    world.wait_condition("tune", "Accepted", "Accepted")
    after = world.wait_pods("tune-train-1", 2)
    assert [pod["metadata"]["uid"] for pod in after] == [pod["metadata"]["uid"] for pod in before]
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    status = world.wait_phase("tune", "Succeeded")
    assert (status["attempt"], status["restarts"]) == (1, 0)
