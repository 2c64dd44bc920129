"""Schedules on a real API server. Nothing waits for a start time: the last one has passed, and the status says that it was not handled."""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_crds.contract import TerminationMessage
from finetune_operator.names import scheduled_job_name
from finetune_operator.owners import build_owner_reference
from finetune_operator.text import format_time
from fixtures.operator_processes.jobs import PREPARED, TRAINED, job, splits_given
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import OwnWorld, World
from support.waiting import wait_for

Json = dict[str, Any]
KIND, NAME = "FineTuneSchedule", "nightly"
# Deletions of FineTuneJobs and of what they own are the garbage collector's.
GARBAGE_SECONDS = 180.0


class Start:
    """A start time that was some minutes ago, and that comes once a day: the schedule, the time, and the name of the job."""

    def __init__(self, minutes_ago: int) -> None:
        now = datetime.now(UTC).replace(second=0, microsecond=0)
        time = now - timedelta(minutes=minutes_ago)
        self.schedule = f"{time.minute} {time.hour} * * *"
        self.text, self.job = format_time(time), scheduled_job_name(NAME, time)
        tomorrow = time + timedelta(days=1)
        self.next_text, self.next_job = format_time(tomorrow), scheduled_job_name(NAME, tomorrow)


def submit(world: World, start: Start, template: Json, **spec: Any) -> Json:
    """A schedule that is suspended until `begin`."""
    fields = {"schedule": start.schedule, "suspend": True, "jobTemplate": {"spec": template}, **spec}
    meta = {"name": NAME, "namespace": world.namespace}
    return world.api.create(
        {"apiVersion": "finetune.dev/v1alpha1", "kind": KIND, "metadata": meta, "spec": fields}
    )


def edit(world: World, **spec: Any) -> None:
    world.api.patch(KIND, world.namespace, NAME, {"spec": spec})


def begin(world: World) -> None:
    """Resume the schedule, as if its start times of two days were missed."""
    missed = format_time(datetime.now(UTC) - timedelta(days=2))
    wait_reason(world, "Suspended")
    world.api.patch(KIND, world.namespace, NAME, {"status": {"lastScheduleTime": missed}}, status=True)
    edit(world, suspend=False)


def status(world: World) -> Json:
    return dict((world.api.get(KIND, world.namespace, NAME) or {}).get("status") or {})


def conditions(world: World) -> dict[str, Json]:
    return {item["type"]: item for item in status(world).get("conditions", [])}


def wait_reason(world: World, reason: str) -> Json:
    """The condition Ready, once it has this reason."""

    def ready() -> Json | None:
        item = conditions(world).get("Ready", {})
        return item if item.get("reason") == reason else None

    return wait_for(f"Ready is {reason}", ready, world.patience, instead=lambda: status(world))


def jobs(world: World) -> list[str]:
    return sorted(item["metadata"]["name"] for item in world.api.list("FineTuneJob", world.namespace))


def test_the_words_of_the_api_server_about_a_template(world: World) -> None:
    template = {**splits_given()["spec"], "trainning": {}, "method": {"type": "LORA"}}
    start = Start(10)
    submit(world, start, template)
    ready = wait_reason(world, "JobTemplateInvalid")
    assert ready["message"].startswith(
        f"the API server refuses FineTuneJob {start.next_job} of spec.jobTemplate: "
    )
    assert 'unknown field "spec.trainning"' in ready["message"]
    assert (ready["status"], status(world)["phase"]) == ("False", "Blocked")
    assert conditions(world)["Stalled"]["message"] == ready["message"]
    # A rule that the schema cannot express, and nothing that the schema could refuse earlier.
    edit(world, jobTemplate={"spec": {**template, "trainning": None, "method": {"type": "Full", "lora": {}}}})

    def says_rule() -> bool:
        return "lora for LoRA, QLoRA and DoRA" in conditions(world)["Ready"]["message"]

    wait_for("the rule is named", says_rule, world.patience, instead=lambda: conditions(world))
    edit(
        world, jobTemplate={"spec": {**template, "trainning": None, "method": {"type": "Full", "lora": None}}}
    )
    wait_reason(world, "Suspended")
    assert sorted(conditions(world)) == ["Accepted", "Ready", "Suspended"]
    assert jobs(world) == []


def test_a_start_time_that_was_missed_creates_one_job_which_goes_with_its_schedule(
    world: World, plane: Plane
) -> None:
    start = Start(10)
    uid = submit(world, start, splits_given()["spec"], concurrencyPolicy="Forbid")["metadata"]["uid"]
    begin(world)
    wait_reason(world, "JobCreated")
    body = world.job(start.job)
    assert body["metadata"]["labels"]["finetune.dev/schedule"] == NAME
    assert body["metadata"]["ownerReferences"] == [build_owner_reference(KIND, NAME, uid)]
    found = status(world)
    assert (found["lastScheduleTime"], found["active"], found["activeCount"]) == (
        start.text,
        [{"name": start.job}],
        1,
    )
    assert found["nextScheduleTime"] == start.next_text
    world.run_pods(f"{start.job}-train-1", 2)
    # Another start time, which waits for the job.
    second = Start(5)
    edit(world, schedule=second.schedule)
    message = wait_reason(world, "JobStillRunning")["message"]
    assert message.startswith(f"the start for {second.text} waits until FineTuneJob {start.job} has finished")
    command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", world.namespace]
    shown = subprocess.run([*command, "get", "fts"], capture_output=True, text=True, check=True).stdout
    head, row = (re.split(r"\s{2,}", line.strip()) for line in shown.splitlines())
    assert head == ["NAME", "SCHEDULE", "SUSPEND", "ACTIVE", "LAST SCHEDULE", "READY", "REASON", "AGE"]
    assert (row[:4], row[5:7]) == ([NAME, second.schedule, "false", "1"], ["True", "JobStillRunning"])
    world.api.delete(KIND, world.namespace, NAME)

    def is_gone() -> bool:
        return not world.remaining_pods() and jobs(world) == []

    wait_for("its job is gone, with its pods", is_gone, GARBAGE_SECONDS, instead=lambda: jobs(world))
    events = [
        item for item in world.api.list("Event", world.namespace) if item["involvedObject"]["kind"] == KIND
    ]
    assert {item["reason"] for item in events} == {"Suspended", "Resumed", "JobCreated", "JobStillRunning"}


def prepared(digest: str) -> TerminationMessage:
    assert PREPARED.prep
    return TerminationMessage(prep=PREPARED.prep.model_copy(update={"digest": digest, "source_version": 3}))


def test_a_job_trains_only_on_other_data(world: World) -> None:
    first, second, third = Start(15), Start(10), Start(5)
    submit(world, first, job(register=None)["spec"], onlyIfDataChanged=True)
    begin(world)
    wait_reason(world, "JobCreated")
    world.end_pods(f"{first.job}-prep", [0], [prepared("d1")])
    world.run_pods(f"{first.job}-train-1", 2)
    world.end_pods(f"{first.job}-train-1", [0, 0], [TRAINED, None])
    world.wait_phase(first.job, "Succeeded")

    def has_data() -> bool:
        return "data" in status(world)

    wait_for("its data is recorded", has_data, world.patience, instead=lambda: status(world))
    assert status(world)["data"] == {"job": first.job, "digest": "d1", "sourceVersion": 3}
    # The same data: the job ends, its run does not look as one of a training, and the schedule says so.
    edit(world, schedule=second.schedule)
    world.wait_pods(f"{second.job}-prep", 1)
    uid = str(world.job(second.job)["metadata"]["uid"])
    world.end_pods(f"{second.job}-prep", [0], [prepared("d1")])
    message = wait_reason(world, "DataUnchanged")["message"]
    assert message == (
        f"no FineTuneJob was kept for {second.text}: its data has digest d1, as that of {first.job}, which succeeded"
    )
    wait_for("it is gone", lambda: jobs(world) == [first.job], GARBAGE_SECONDS, instead=lambda: jobs(world))

    def states() -> list[str]:
        return [run["info"]["status"] for run in world.mlflow.runs_of(uid)]

    wait_for("its run is closed", lambda: states() == ["KILLED"], world.patience, instead=states)
    found = status(world)
    assert (found["lastScheduleTime"], found["lastSkippedTime"]) == (second.text, second.text)
    assert (found["data"]["job"], found["activeCount"]) == (first.job, 0)
    # Other data.
    edit(world, schedule=third.schedule)
    world.end_pods(f"{third.job}-prep", [0], [prepared("d2")])
    world.run_pods(f"{third.job}-train-1", 2)
    assert jobs(world) == [first.job, third.job]


def test_an_operator_that_was_killed_between_its_writes_creates_no_second_job(own_world: OwnWorld) -> None:
    """It had created the job, and had not recorded the start time."""
    world, start = own_world, Start(10)
    uid = submit(world, start, splits_given()["spec"], concurrencyPolicy="Replace")["metadata"]["uid"]
    wait_reason(world, "Suspended")
    world.operator.kill()
    begin(world)
    body = splits_given(start.job)
    body["metadata"]["ownerReferences"] = [build_owner_reference(KIND, NAME, uid)]
    created = world.submit(body)["metadata"]["uid"]
    world.operator.start()
    wait_reason(world, "JobCreated")
    assert (jobs(world), world.job(start.job)["metadata"]["uid"]) == ([start.job], created)
    assert status(world)["lastScheduleTime"] == start.text
    world.settle(world.operator)
    assert (jobs(world), world.job(start.job)["metadata"]["uid"]) == ([start.job], created)


REFUSED: dict[str, tuple[Json, str]] = {
    "a schedule with seconds": ({"schedule": "0 0 2 * * *"}, "spec.schedule"),
    "an hour that is too large": ({"schedule": "0 25 * * *"}, "spec.schedule"),
    "a zone in the schedule": ({"schedule": "TZ=UTC 0 2 * * *"}, "spec.schedule"),
    "an unknown policy": ({"concurrencyPolicy": "Queue"}, "spec.concurrencyPolicy"),
    "no template": ({"jobTemplate": None}, "spec.jobTemplate"),
    "a template without a spec": ({"jobTemplate": {}}, "spec.jobTemplate.spec"),
    "a name in the template": (
        {"jobTemplate": {"metadata": {"name": "a"}, "spec": {}}},
        "spec.jobTemplate.metadata.name",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_the_api_server_refuses(fields: Json, message: str, world: World) -> None:
    body = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": world.namespace},
        "spec": {"schedule": "@daily", "jobTemplate": {"spec": {}}} | fields,
    }
    with pytest.raises(Exception, match=r"4(00|22)") as raised:
        world.api.create(body, strict=True, dry_run=True)
    assert message in str(raised.value)


def test_a_name_is_bounded_so_that_the_names_of_jobs_are(world: World) -> None:
    spec = {"schedule": "@daily", "jobTemplate": {"spec": {}}}
    meta = {"name": "a" * 31, "namespace": world.namespace}
    body = {"apiVersion": "finetune.dev/v1alpha1", "kind": KIND, "metadata": meta, "spec": spec}
    assert world.api.create(body, strict=True, dry_run=True)["spec"]["timeZone"] == "Etc/UTC"
    with pytest.raises(Exception, match=r"metadata\.name must have at most 31"):
        world.api.create({**body, "metadata": {**meta, "name": "a" * 32}}, strict=True, dry_run=True)
