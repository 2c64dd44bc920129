"""Two jobs with the same preparation, on a real API server: the second waits, says so, and goes on."""

from __future__ import annotations

from typing import Any

from fixtures.operator_processes.jobs import PREPARED, error, job
from fixtures.operator_processes.world import World
from support.waiting import wait_for

Json = dict[str, Any]


def waits_for(name: str) -> str:
    return f"FineTuneJob {name} prepares the same data: this job waits for the table that {name} writes, and uses the table"


def begin(world: World) -> None:
    """Submit two jobs; the first prepares, the second waits."""
    world.submit(job("first"))
    world.run_pods("first-prep", 1)
    world.wait_phase("first", "Preparing")
    world.submit(job("second"))
    waiting = world.wait_condition("second", "Prepared", "WaitingForPreparation")
    assert (waiting["message"], world.status("second")["phase"]) == (waits_for("first"), "Pending")
    assert "startTime" not in world.status("second")
    assert world.api.get("Job", world.namespace, "second-prep") is None


def holders(world: World) -> list[tuple[str, str]]:
    """Of each Lease of the namespace, the holder and the owner."""
    return [
        (item["spec"]["holderIdentity"], item["metadata"]["ownerReferences"][0]["uid"])
        for item in world.api.list("Lease", world.namespace)
    ]


def uid(world: World, name: str) -> str:
    return str(world.job(name)["metadata"]["uid"])


def test_the_second_goes_on_when_the_first_has_prepared(world: World) -> None:
    begin(world)
    assert holders(world) == [("first", uid(world, "first"))]
    world.end_pods("first-prep", [0], [PREPARED])
    world.run_pods("second-prep", 1)
    world.wait_phase("second", "Preparing")
    assert PREPARED.prep
    preparation = PREPARED.prep.model_copy(update={"digest": "0123456789ab", "written_by": "first"})
    world.end_pods("second-prep", [0], [PREPARED.model_copy(update={"prep": preparation})])
    data = world.wait_phase("second", "Starting")["data"]
    assert (data["digest"], data["writtenBy"]) == ("0123456789ab", "first")
    message = world.condition("second", "Prepared")["message"]
    assert message.startswith("/data/splits version 7, written by FineTuneJob first: 900 train")
    # The first one may still be asked for what the third reads: the Lease is the third's.
    world.submit(job("third"))
    world.wait_pods("third-prep", 1)
    assert holders(world) == [("third", uid(world, "third"))]
    # Another preparation, and one that shares nothing, wait for nobody.
    data = job()["spec"]["data"]
    for name, prepare in (("other", {"maxTokens": 100}), ("alone", {"reuse": "Never"})):
        world.submit(job(name, data=data | {"prepare": data["prepare"] | prepare}))
        world.wait_pods(f"{name}-prep", 1)


def test_the_second_prepares_when_the_first_fails(world: World) -> None:
    begin(world)
    world.end_pods("first-prep", [65], [error("NoRows", "there are no rows")])
    world.wait_pods("second-prep", 1)
    assert holders(world) == [("second", uid(world, "second"))]


def test_the_second_prepares_when_the_first_is_suspended_and_the_first_waits_then(world: World) -> None:
    begin(world)
    world.api.patch("FineTuneJob", world.namespace, "first", {"spec": {"suspend": True}})
    world.run_pods("second-prep", 1)
    wait_for("no pod of the first", lambda: len(world.remaining_pods()) == 1)
    world.wait_phase("second", "Preparing")
    world.api.patch("FineTuneJob", world.namespace, "first", {"spec": {"suspend": False}})
    waiting = world.wait_condition("first", "Prepared", "WaitingForPreparation")
    assert waiting["message"] == waits_for("second")


def test_the_second_prepares_when_the_first_is_deleted(world: World) -> None:
    begin(world)
    world.api.delete("FineTuneJob", world.namespace, "first")
    world.wait_pods("second-prep", 1)
    assert holders(world) == [("second", uid(world, "second"))]
    # The Lease goes with its job.
    world.api.delete("FineTuneJob", world.namespace, "second")
    wait_for("no Lease", lambda: not holders(world))
