"""A source of type Registry: one Job copies the version, the copy is the candidate, and nothing is copied twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.contract import PodError, TerminationMessage
from finetune_operator.errors import Problem
from finetune_operator.kube import KubeError
from fixtures.operator_in_memory.kills import assert_one_job, promote_with_kills
from fixtures.operator_in_memory.promotions import MODEL, SOURCE_URI, World
from unit.operator.modelpromotion.champion import world

Json = dict[str, Any]
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow cannot be reached: HTTP 503")
WHAT = f"version 5 of {MODEL} at {SOURCE_URI}"


def source(**fields: Any) -> Json:
    """spec.source of a copy, by default of version 5."""
    registry: Json = {"uri": SOURCE_URI, "model": MODEL, **fields}
    if "alias" not in registry:
        registry.setdefault("version", "5")
    return {"type": "Registry", "registry": registry}


def copying(gates: list[Json] | None = None, **spec: Any) -> World:
    """A promotion of version 5 of the other registry, whose alias candidate points there."""
    simulation = world(gates=gates or [], **{"source": source(), **spec})
    simulation.source.add("5", eval_loss=2.0)
    simulation.source.add("6", eval_loss=1.9)
    simulation.source.aliases["candidate"] = "5"
    return simulation


def job_name(simulation: World, version: str = "5") -> str:
    return str(simulation.jobs()[version]["metadata"]["name"])


def finish(
    simulation: World, version: str = "5", copy: str = "4", loss: float = 2.0, *, ends: bool = True
) -> None:
    """Play the Job: the copy is registered with the tag that its container was told, and the Job ends."""
    [main] = simulation.jobs()[version]["spec"]["template"]["spec"]["containers"]
    digest = main["args"][main["args"].index("--digest") + 1]
    simulation.registry.exists = True
    simulation.registry.add(copy, tags={"finetune_copy": digest}, eval_loss=loss)
    if ends:
        simulation.end_job(version)


def source_ready(simulation: World) -> tuple[str, str] | None:
    return simulation.says("SourceReady")


async def test_the_copy_is_the_candidate_and_is_made_once() -> None:
    loss = {"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.5}}
    simulation = copying([loss])
    await simulation.settle()
    name = job_name(simulation)
    assert simulation.phase_and_reason() == "Pending: Copying"
    assert source_ready(simulation) == ("Copying", f"Job {name}, which copies {WHAT}, starts")
    simulation.add_pod(
        "5", phase="Pending", initContainerStatuses=[{"name": "download", "state": {"running": {}}}]
    )
    await simulation.settle()
    assert source_ready(simulation) == (
        "Copying",
        f"Job {name}, which copies {WHAT}, runs: see kubectl logs -n team job/{name} --all-containers",
    )

    finish(simulation)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert simulation.registry.aliases["champion"] == "4"
    status = simulation.status()
    assert source_ready(simulation) == ("SourceResolved", f"version 4 is the copy of {WHAT}")
    assert status.copied
    assert (status.copied.source_version, status.copied.version) == ("5", "4")
    assert simulation.jobs()["5"]["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    assert simulation.runs.runs["run-1"].status == "FINISHED"

    # Kubernetes deletes the Job, the operator starts anew, and the source is gone: nothing depends on them.
    del simulation.kube.objects["Job", "team", name]
    simulation.source.problem = AWAY
    simulation.restart()
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert source_ready(simulation) == ("SourceResolved", f"version 4 is the copy of {WHAT}")
    assert simulation.kube.done("create").count(f"Job/{name}") == 1
    # Another source has no copy.
    simulation.edit(source={"type": "Version", "version": "4"})
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.status().copied) == ("Promoted: Promoted", None)


async def test_a_job_ends_by_itself_after_its_copy_is_complete() -> None:
    simulation = copying()
    await simulation.settle()
    finish(simulation, ends=False)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert (list(simulation.jobs()), simulation.runs.runs["run-1"].status) == (["5"], "RUNNING")
    simulation.end_job("5")
    await simulation.settle()
    assert simulation.jobs()["5"]["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    assert simulation.runs.runs["run-1"].status == "FINISHED"


async def test_a_promotion_that_is_created_again_finds_the_copy() -> None:
    simulation = copying()
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    simulation.remove()
    for key in [key for key in simulation.kube.objects if key[0] in ("Job", "Pod")]:
        del simulation.kube.objects[key]
    simulation.submit(source=source(), gates=[])
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: InPlace"
    assert simulation.jobs() == {}


async def test_the_first_version_of_a_model_can_be_a_copy() -> None:
    simulation = copying()
    simulation.registry.exists = False
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: Copying"
    finish(simulation)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"


async def test_a_gate_judges_the_copy() -> None:
    simulation = copying([{"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 1.0}}])
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"


async def test_an_alias_of_the_source_is_followed_and_an_outdated_copy_is_stopped() -> None:
    simulation = copying(source=source(alias="candidate"))
    await simulation.settle()
    assert list(simulation.jobs()) == ["5"]
    simulation.source.aliases["candidate"] = "6"
    await simulation.settle()
    assert list(simulation.jobs()) == ["6"]
    assert list(
        {run.tags["finetune_copied_version"]: run.status for run in simulation.runs.runs.values()}.items()
    ) == [
        ("5", "KILLED"),
        ("6", "RUNNING"),
    ]
    finish(simulation, "6")
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "4"
    # While the next version is copied, the alias stays, and the promotion is Ready.
    simulation.source.add("7")
    simulation.source.aliases["candidate"] = "7"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Pending: Copying",
        "4",
    )
    # An alias that goes back finds the copy of then.
    simulation.source.aliases["candidate"] = "6"
    await simulation.settle()
    assert "7" not in simulation.jobs()
    assert simulation.phase_and_reason() == "Promoted: Promoted"


async def test_a_copy_that_the_status_names_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = copying(source=source(alias="candidate"))
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    # The alias of the source is still read, since it may move.
    searches: list[str] = []
    monkeypatch.setattr(type(simulation.registry), "find_tagged", lambda *_: searches.append("search"))
    asked = simulation.source.asked
    simulation.seconds += 60
    await simulation.settle()
    assert (simulation.phase_and_reason(), searches) == ("Promoted: Promoted", [])
    assert simulation.source.asked > asked


async def test_a_source_that_is_set_up_anew_under_the_same_numbers_is_copied_anew() -> None:
    simulation = copying(source=source(alias="candidate"))
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    first = job_name(simulation)
    simulation.source.number = 4
    simulation.source.add("5")
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: Copying"
    names = [body["metadata"]["name"] for key, body in simulation.kube.objects.items() if key[0] == "Job"]
    assert first in names
    assert len(names) == 2


MISSING: dict[str, tuple[Json, str, str]] = {
    "no alias": (
        source(alias="production"),
        "WaitingForAlias",
        f"there is no alias production of {MODEL} at {SOURCE_URI} yet",
    ),
    "no version": (
        source(version=9),
        "WaitingForVersion",
        f"there is no version 9 of {MODEL} at {SOURCE_URI} yet",
    ),
    "no model": (
        source(model="other", alias="candidate"),
        "WaitingForAlias",
        f"there is no alias candidate of other at {SOURCE_URI} yet",
    ),
}


@pytest.mark.parametrize(("spec", "reason", "message"), MISSING.values(), ids=MISSING)
async def test_what_the_source_lacks_is_named(spec: Json, reason: str, message: str) -> None:
    simulation = copying(source=spec)
    await simulation.settle()
    assert source_ready(simulation) == (reason, message)
    assert simulation.phase_and_reason() == f"Pending: {reason}"
    assert simulation.jobs() == {}


async def test_a_version_that_is_not_ready_is_not_copied_yet() -> None:
    simulation = copying()
    simulation.source.versions["5"] = replace(simulation.source.versions["5"], ready=False)
    await simulation.settle()
    assert source_ready(simulation) == ("WaitingForVersion", f"{WHAT} is not ready yet")


async def test_a_promoted_copy_does_not_need_its_source() -> None:
    simulation = copying(source=source(alias="candidate"))
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    simulation.source.problem = AWAY
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert (source_ready(simulation) or ("",))[0] == "SourceUnreadable"


async def test_a_run_that_cannot_be_closed_changes_nothing_about_the_promotion() -> None:
    simulation = copying()
    await simulation.settle()
    finish(simulation)
    simulation.runs.close_refusal = AWAY
    for _ in range(8):
        await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert "ttlSecondsAfterFinished" not in simulation.jobs()["5"]["spec"]
    simulation.runs.close_refusal = None
    await simulation.settle()
    assert simulation.runs.runs["run-1"].status == "FINISHED"
    assert simulation.jobs()["5"]["spec"]["ttlSecondsAfterFinished"] == 24 * 3600


async def test_a_source_that_does_not_answer_stops_neither_repairs_nor_a_copy() -> None:
    simulation = copying(source=source(alias="candidate"))
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    simulation.source.aliases["candidate"] = "6"
    await simulation.settle()
    simulation.source.problem = AWAY
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "4"
    assert list(simulation.jobs()) == ["5", "6"]
    assert source_ready(simulation) == (
        "SourceUnreadable",
        f"alias candidate of {MODEL} at {SOURCE_URI} cannot be read: {AWAY.message}",
    )


FAILURES: dict[str, tuple[Json, str]] = {
    "a sentence of the download": (
        {
            "code": 64,
            "container": "download",
            "message": TerminationMessage(
                error=PodError(reason="CopyRefused", message="it has no files")
            ).dump(),
        },
        f"{WHAT} cannot be copied: it has no files: correct this and delete Job {{name}} to copy again, or change spec.source",
    ),
    "a killed upload": (
        {"code": 137, "message": "line 1\nline 2"},
        f"{WHAT} cannot be copied (exit code 137), see kubectl logs -n team job/{{name}} --all-containers: correct this and delete Job "
        "{name} to copy again, or change spec.source: line 1\nline 2",
    ),
}


@pytest.mark.parametrize(("end", "expected"), FAILURES.values(), ids=FAILURES)
async def test_a_failed_copy_says_why_and_is_repeated_on_request_alone(end: Json, expected: str) -> None:
    simulation = copying()
    await simulation.settle()
    name = job_name(simulation)
    simulation.end_job("5", **end)
    await simulation.settle()
    simulation.restart()
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: CopyFailed"
    assert source_ready(simulation) == ("CopyFailed", expected.format(name=name))
    assert simulation.runs.runs["run-1"].status == "FAILED"
    assert simulation.kube.done("create").count(f"Job/{name}") == 1
    # A deleted Job is created again; a changed spec is another Job.
    del simulation.kube.objects["Job", "team", name]
    del simulation.kube.objects["Pod", "team", f"{name}-0"]
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: Copying"
    assert job_name(simulation) == name
    simulation.edit(source=source(timeoutSeconds=60))
    await simulation.settle()
    assert job_name(simulation) != name
    assert f"Job/{name}" in simulation.kube.done("delete")
    # All of them log to one run.
    assert list(simulation.runs.runs) == ["run-1"]


async def test_a_copy_without_an_end_names_the_limit() -> None:
    simulation = copying(source=source(timeoutSeconds=60))
    await simulation.settle()
    name = job_name(simulation)
    simulation.add_pod("5", phase="Failed", reason="DeadlineExceeded")
    condition = {"type": "Failed", "status": "True"}
    simulation.kube.keep({**simulation.jobs()["5"], "status": {"conditions": [condition]}})
    await simulation.settle()
    assert source_ready(simulation) == (
        "CopyFailed",
        f"{WHAT} cannot be copied: pod {name}-0 did not end within 60 s: raise spec.source.registry.timeoutSeconds; "
        f"see kubectl logs -n team job/{name} --all-containers",
    )


async def test_a_copy_that_somebody_deletes_is_made_again() -> None:
    simulation = copying()
    await simulation.settle()
    finish(simulation)
    await simulation.settle()
    name = job_name(simulation)
    # A day later, Kubernetes has deleted the Job.
    del simulation.kube.objects["Job", "team", name]
    simulation.registry.delete("4")
    await simulation.settle()
    assert simulation.kube.done("create").count(f"Job/{name}") == 2


async def test_a_job_that_left_no_version_is_not_repeated_by_itself() -> None:
    simulation = copying()
    await simulation.settle()
    name = job_name(simulation)
    simulation.end_job("5")
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: CopyFailed"
    assert (source_ready(simulation) or ("", ""))[1] == (
        f"Job {name} copied {WHAT}, but {MODEL} has no version with its tag finetune_copy: somebody deleted the version or the tag: delete "
        f"Job {name} to copy again, or change spec.source"
    )


async def test_a_job_that_the_api_server_refuses_is_reported_once() -> None:
    simulation = copying()
    simulation.kube.refuse["create", "Job"] = KubeError(422, 'unknown field "spec.template.spec.foo"')
    await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Pending: CopyNotStarted"
    reason, message = source_ready(simulation) or ("", "")
    assert message.startswith(f"{WHAT} cannot be copied yet: Job champion-copy-")
    written = simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"]["resourceVersion"]
    await simulation.operator.look("champion")
    after = simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"]["resourceVersion"]
    assert (reason, written) == ("CopyNotStarted", after)
    del simulation.kube.refuse["create", "Job"]
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: Copying"


async def test_an_image_that_cannot_be_pulled_is_named() -> None:
    simulation = copying()
    await simulation.settle()
    name = job_name(simulation)
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    container = {"name": "download", "image": "trainer:1", "state": {"waiting": waiting}}
    simulation.add_pod("5", phase="Pending", initContainerStatuses=[container])
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: CopyNotStarted"
    assert (source_ready(simulation) or ("", ""))[1] == (
        f"Job {name}, which copies {WHAT}, cannot run: pod {name}-0 cannot pull trainer:1: ErrImagePull: not found"
    )


@pytest.mark.parametrize(
    "spec",
    [{"suspend": True}, {"rollbackTo": {"type": "Version", "version": "1"}}],
    ids=["suspended", "rolled back"],
)
async def test_what_runs_is_stopped_and_runs_again_afterwards(spec: Json) -> None:
    simulation = copying()
    await simulation.settle()
    simulation.edit(**spec)
    await simulation.settle()
    assert simulation.jobs() == {}
    assert simulation.runs.runs["run-1"].status == "KILLED"
    undo: Json = dict.fromkeys(spec)
    simulation.edit(**undo)
    await simulation.settle()
    assert list(simulation.jobs()) == ["5"]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_an_operator_that_dies_at_any_write_makes_one_copy(before: bool) -> None:
    async for simulation in promote_with_kills(copying, finish, before=before):
        assert_one_job(simulation)
