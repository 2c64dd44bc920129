"""The MLflow runs of deleted jobs, also of those that were deleted while the operator was down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.abandoned_runs import AbandonedRuns, close_run_of_deleted
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import SETTINGS, UID, condition, ftj, status
from fixtures.operator_in_memory.parts import parts
from support.http_server import Answer, Request, serving

Json = dict[str, Any]
NAMESPACE: Json = {"kind": "Namespace", "metadata": {"name": "team", "namespace": "", "uid": "n1"}}
OTHER: Json = {"kind": "Namespace", "metadata": {"name": "other", "namespace": "", "uid": "n2"}}
JOB: Json = {"kind": "FineTuneJob", "metadata": {"name": "tune", "namespace": "team", "uid": "j1"}}


def build_run(run_id: str, job: str, uid: str, namespace_uid: str = "n1") -> Json:
    tags = {
        contract.TAG_JOB: job,
        contract.TAG_JOB_UID: uid,
        contract.TAG_NAMESPACE_UID: namespace_uid,
    }
    return {
        "info": {"run_id": run_id, "experiment_id": "1", "status": "RUNNING"},
        "data": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
    }


RUNS = [
    build_run("of-a-job-that-no-name-fits", "team/a/b", "j6"),
    build_run("of-a-job-that-exists", "team/tune", "j1"),
    build_run("of-a-deleted-job", "team/gone", "j2"),
    build_run("of-an-earlier-job-of-the-name", "team/tune", "j0"),
    build_run("of-another-cluster", "team/gone", "j3", namespace_uid="n9"),
    build_run("of-a-namespace-that-is-not-watched", "other/gone", "j4", namespace_uid="n2"),
    build_run("of-no-job", "", "j5"),
]


class Mlflow:
    """Answers searches with one run a page, and records the runs that were closed."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.refused: list[str] = []
        self.closed: list[tuple[str, str]] = []
        self.searches: list[Json] = []

    def respond(self, request: Request) -> Answer:
        body = json.loads(request.body)
        match request.target.removeprefix("/api/2.0/mlflow/"):
            case "experiments/search" if body.get("page_token"):
                return Answer(200, {"experiments": [{"experiment_id": "2"}]})
            case "experiments/search":
                return Answer(200, {"experiments": [{"experiment_id": "1"}], "next_page_token": "more"})
            case "runs/search":
                self.searches.append(body)
                page = int(body.get("page_token", "0"))
                more = {"next_page_token": str(page + 1)} if page + 1 < len(RUNS) else {}
                return Answer(200, {"runs": RUNS[page : page + 1], **more})
            case _ if body["run_id"] in self.refuses:
                self.refused.append(body["run_id"])
                return Answer(403, {"error_code": "PERMISSION_DENIED"})
            case _:
                self.closed.append((body["run_id"], body["status"]))
                return Answer(200, {})


async def test_runs_are_closed_whose_job_no_longer_exists_in_this_cluster() -> None:
    kube, mlflow = StandIn(NAMESPACE, OTHER, JOB), Mlflow()
    with serving(mlflow.respond) as uri:
        settings = Settings(tracking_uri=uri, namespaces=("team",))
        await AbandonedRuns(kube, Store(), settings, NamespaceReader(kube, lambda: 0.0)).run()
    assert mlflow.closed == [("of-a-deleted-job", "KILLED"), ("of-an-earlier-job-of-the-name", "KILLED")]
    assert mlflow.refused == []
    assert [search["experiment_ids"] for search in mlflow.searches] == [["1", "2"]] * len(RUNS)
    assert kube.done("get").count("Namespace/team") == 1


async def test_no_run_is_closed_while_namespaces_cannot_be_read() -> None:
    kube, mlflow = StandIn(NAMESPACE), Mlflow()
    kube.refuse["get", "Namespace"] = KubeError(403, "no")
    namespaces = NamespaceReader(kube, lambda: 0.0)
    with serving(mlflow.respond) as uri:
        await AbandonedRuns(kube, Store(), Settings(tracking_uri=uri), namespaces).close()
    assert mlflow.closed == []
    assert await namespaces.build_tags("team") == {}


async def test_the_run_of_a_job_that_the_store_has_needs_no_read_of_the_job() -> None:
    kube, mlflow, store = StandIn(NAMESPACE, JOB), Mlflow(), Store()
    store.put("FineTuneJob", {**JOB, "metadata": {**JOB["metadata"], "resourceVersion": "7"}})
    with serving(mlflow.respond) as uri:
        settings = Settings(tracking_uri=uri, namespaces=("team",))
        await AbandonedRuns(kube, store, settings, NamespaceReader(kube, lambda: 0.0)).run()
    # Of the job that exists, nothing; of an earlier one of its name, whether it is still there.
    assert kube.done("get") == ["Namespace/team", "FineTuneJob/gone", "FineTuneJob/tune"]
    assert len(mlflow.closed) == 2


async def test_nothing_is_searched_without_a_server() -> None:
    kube = StandIn()
    await AbandonedRuns(kube, Store(), Settings(), NamespaceReader(kube, lambda: 0.0)).run()
    assert kube.asked == []


async def test_a_run_that_cannot_be_closed_keeps_no_other_run_open() -> None:
    kube, mlflow = StandIn(NAMESPACE, OTHER, JOB), Mlflow("of-a-deleted-job")
    with serving(mlflow.respond) as uri:
        settings = Settings(tracking_uri=uri, namespaces=("team",))
        await AbandonedRuns(kube, Store(), settings, NamespaceReader(kube, lambda: 0.0)).run()
    assert (mlflow.refused, mlflow.closed) == (
        ["of-a-deleted-job"],
        [("of-an-earlier-job-of-the-name", "KILLED")],
    )


async def test_a_server_that_is_away_is_searched_again_with_growing_delays() -> None:
    kube, delays = StandIn(), list[float]()

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 8:
            raise TimeoutError

    settings = Settings(tracking_uri="http://127.0.0.1:1")
    with pytest.raises(TimeoutError):
        await AbandonedRuns(kube, Store(), settings, NamespaceReader(kube, lambda: 0.0), sleep).run()
    assert delays == [60, 120, 240, 480, 960, 1920, 3600, 3600]


async def test_a_server_that_refuses_the_operator_is_searched_once() -> None:
    asked: list[str] = []

    def respond(request: Request) -> Answer:
        asked.append(request.target)
        return Answer(401, {"error_code": "UNAUTHENTICATED"})

    kube = StandIn()
    with serving(respond) as uri:
        await AbandonedRuns(
            kube, Store(), Settings(tracking_uri=uri), NamespaceReader(kube, lambda: 0.0)
        ).run()
    assert asked == ["/api/2.0/mlflow/experiments/search"]


OPEN = MlflowStatus(run_id="r1", experiment_id="7")
FINISHED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
FAILED = condition(ConditionType.FAILED, "True", ConditionReason.OUT_OF_MEMORY)
SUCCEEDED = condition(ConditionType.SUCCEEDED, "True", ConditionReason.SUCCEEDED)
UNCHANGED = condition(ConditionType.SUCCEEDED, "True", ConditionReason.DATA_UNCHANGED)
SEARCH = ("find", UID, "team")
# The last status; whether its run was requested; the state of the run that MLflow finds by the job's uid (None: there is no run); the
# requests to MLflow.
DELETIONS: dict[str, tuple[FineTuneJobStatus, bool, str | None, list[tuple[object, ...]]]] = {
    "while it trains": (status(mlflow=OPEN, phase="Training"), True, "RUNNING", [("close", "r1", "KILLED")]),
    "after it failed": (
        status(FAILED, mlflow=OPEN, phase="Failed"),
        True,
        "RUNNING",
        [("close", "r1", "FAILED")],
    ),
    "after it succeeded": (
        status(SUCCEEDED, mlflow=OPEN, phase="Succeeded"),
        True,
        "RUNNING",
        [("close", "r1", "FINISHED")],
    ),
    "after it trained nothing": (
        status(UNCHANGED, mlflow=OPEN, phase="Succeeded"),
        True,
        "RUNNING",
        [("close", "r1", "KILLED")],
    ),
    "after its run was closed": (status(FINISHED, mlflow=OPEN), True, "FINISHED", []),
    "before its run was requested": (status(), False, None, []),
    "before its run was created": (status(), True, None, [SEARCH]),
    "before its status named the run": (status(), True, "RUNNING", [SEARCH, ("close", "r2", "KILLED")]),
    "before its status named the run, which somebody closed": (status(), True, "FAILED", [SEARCH]),
}


@pytest.mark.parametrize(("last", "was_requested", "state", "requests"), DELETIONS.values(), ids=DELETIONS)
async def test_the_run_of_a_job_that_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
    last: FineTuneJobStatus,
    was_requested: bool,
    state: str | None,
    requests: list[tuple[object, ...]],
) -> None:
    sent: list[tuple[object, ...]] = []

    def find_run(_server: Server, *arguments: object) -> Run | None:
        sent.append(("find", *arguments))
        return Run("r2", "7", state) if state else None

    monkeypatch.setattr(Server, "find_run", find_run)
    monkeypatch.setattr(Server, "finish_run", lambda _server, *arguments: sent.append(("close", *arguments)))
    observer = parts(StandIn(), SETTINGS, lambda: 0.0).reconciler.observer
    monkeypatch.setattr(observer.run_creator, "forget", lambda _: was_requested)
    await close_run_of_deleted(observer, ftj(last))
    assert sent == requests


@pytest.mark.parametrize(("code", "reads"), [(403, 1), (0, 2), (429, 2)])
async def test_a_namespace_is_read_again_unless_it_is_forbidden(code: int, reads: int) -> None:
    kube = StandIn(NAMESPACE)
    kube.refuse["get", "Namespace"] = KubeError(code, "no")
    namespaces = NamespaceReader(kube, lambda: 0.0)
    assert [await namespaces.build_tags("team") for _ in range(2)] == [{}, {}]
    assert kube.done("get") == ["Namespace/team"] * reads
