"""Runs of the preparation, through the real SDK: what is uploaded and submitted, and what is made of each answer."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.service.jobs import RunLifecycleStateV2State
from databricks.sdk.service.jobs import TerminationCodeCode as Code

from finetune_crds.contract import PodError, RunReport, TerminationMessage
from finetune_crds.databricks import Compute
from finetune_operator.databricks import runs
from finetune_operator.databricks.model import Run, Submission
from finetune_operator.databricks.workspace import open_workspace
from finetune_operator.errors import ExternalError
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Fault, Workspace
from fixtures.fake_databricks.files import Files

Json = dict[str, Any]
VOLUME = "/Volumes/main/llm/work"
FOLDER = f"{VOLUME}/finetune/jobs/team-tune-0f1e2d3c/1"
NAME = "finetune_prep-0.1.0.post7-py3-none-any.whl"
WHEEL = f"{VOLUME}/finetune/wheels/{NAME}"
Life = RunLifecycleStateV2State
NEW: Json = {"sparkVersion": "17.3.x-scala2.13", "nodeType": "i3.xlarge", "workers": 4, "env": {"A": "b"}}


@dataclass(frozen=True)
class Desk:
    """A workspace with a volume, a client of it, and the operator's wheel."""

    state: Workspace
    client: WorkspaceClient
    wheels: Path

    def submit(self, wanted: Submission | None = None) -> str:
        return runs.submit(self.client, wanted or submission(), self.wheels)

    def read(self, run_id: str) -> Run:
        return runs.read(self.client, run_id, FOLDER)


@pytest.fixture
def desk(databricks: Workspace, tmp_path: Path) -> Desk:
    databricks.files.volumes.add(VOLUME)
    databricks.jobs.runs_wheels = False
    (tmp_path / NAME).write_bytes(b"the wheel")
    return Desk(databricks, open_workspace(databricks.secret, Settings()), tmp_path)


def submission(compute: Json | None = None, *, attempt: int = 1, **more: Any) -> Submission:
    return Submission(
        name="finetune-prep team/tune uid 1",
        token=f"uid-digest-{attempt}",
        volume=f"{VOLUME}/finetune",
        folder=FOLDER,
        recipe="kind: Recipe\n",
        compute=Compute.model_validate(compute or {"type": "Serverless"}),
        **more,
    )


COMPUTE: dict[str, tuple[Json, Json, Json]] = {
    "serverless": ({"type": "Serverless"}, {}, {"environment_key": "prepare"}),
    "a cluster that exists": (
        {"type": "ExistingCluster", "existingCluster": {"clusterId": "1118-a"}},
        {},
        {"existing_cluster_id": "1118-a", "libraries": [{"whl": WHEEL}]},
    ),
    "a new cluster": (
        {"type": "NewCluster", "newCluster": NEW},
        {"spark.sql.shuffle.partitions": "8"},
        {
            "new_cluster": {
                "spark_version": "17.3.x-scala2.13",
                "node_type_id": "i3.xlarge",
                "num_workers": 4,
                "data_security_mode": "SINGLE_USER",
                "spark_conf": {"spark.sql.shuffle.partitions": "8"},
                "spark_env_vars": {"A": "b"},
            },
            "libraries": [{"whl": WHEEL}],
        },
    ),
    "a driver alone, of a pool, under a policy": (
        {
            "type": "NewCluster",
            "newCluster": {
                "sparkVersion": "17.3.x-scala2.13",
                "instancePoolId": "p",
                "policyId": "q",
                "workers": 0,
            },
        },
        {},
        {
            "new_cluster": {
                "spark_version": "17.3.x-scala2.13",
                "instance_pool_id": "p",
                "policy_id": "q",
                "apply_policy_default_values": True,
                "num_workers": 0,
                "data_security_mode": "SINGLE_USER",
                "spark_conf": {"spark.databricks.cluster.profile": "singleNode", "spark.master": "local[*]"},
                "custom_tags": {"ResourceClass": "SingleNode"},
            },
            "libraries": [{"whl": WHEEL}],
        },
    ),
}


@pytest.mark.parametrize(("compute", "conf", "expected"), COMPUTE.values(), ids=COMPUTE)
def test_what_is_submitted(desk: Desk, compute: Json, conf: Json, expected: Json) -> None:
    desk.state.jobs.clusters.add("1118-a")
    run_id = desk.submit(submission(compute, conf=conf))
    run = desk.state.jobs.held[int(run_id)]
    assert run.task.as_dict() == {
        "task_key": "prepare",
        "disable_auto_optimization": True,
        "max_retries": 0,
        "python_wheel_task": {
            "package_name": "finetune_prep",
            "entry_point": "finetune-prep-databricks",
            "parameters": ["--folder", FOLDER],
        },
        **expected,
    }
    assert (run.wheel, run.name) == (WHEEL, "finetune-prep team/tune uid 1")
    assert (desk.state.files.read(WHEEL), desk.state.files.read(f"{FOLDER}/recipe.yaml")) == (
        b"the wheel",
        b"kind: Recipe\n",
    )


def test_a_run_is_told_of_an_mlflow_run_of_its_own_workspace_alone(desk: Desk) -> None:
    hosts = (desk.state.uri, "https://other.cloud.databricks.com", "http://mlflow:5000")
    submissions = [
        submission(attempt=number, mlflow_run="r1", mlflow_host=host) for number, host in enumerate(hosts)
    ]
    tasks = [
        desk.state.jobs.held[int(desk.submit(item))].task.as_dict()["python_wheel_task"]
        for item in submissions
    ]
    assert [task["parameters"] for task in tasks] == [
        ["--folder", FOLDER, "--mlflow-run", "r1"],
        ["--folder", FOLDER],
        ["--folder", FOLDER],
    ]


def test_equal_submissions_are_one_run_and_one_upload(desk: Desk) -> None:
    first, second = (desk.submit() for _ in range(2))
    next_run = desk.submit(submission(attempt=2))
    uploads = [path for method, path in desk.state.asked if method == "PUT" and path.endswith(".whl")]
    assert (first == second != next_run, len(desk.state.jobs.held), len(uploads)) == (True, 2, 1)


def denied(action: str) -> Callable[[Workspace], None]:
    return lambda state: state.denied.add(action)


def without_volume(state: Workspace) -> None:
    state.files.volumes.clear()


def away(state: Workspace) -> None:
    state.faults.append(
        Fault(503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "later"}, path="/api/2.2/jobs")
    )


def with_a_cluster_that_ends(state: Workspace) -> None:
    answer = {"error_code": "INVALID_STATE", "message": "Cluster 1118-b is terminating"}
    state.faults.append(Fault(400, answer, path="/api/2.2/jobs"))


def without_login(state: Workspace) -> None:
    state.tokens.clear()


GONE: Json = {"type": "ExistingCluster", "existingCluster": {"clusterId": "1118-b"}}
REFUSALS: dict[str, tuple[Callable[[Workspace], None], Json | None, str, str]] = {
    "no such cluster": (
        lambda _: None,
        GONE,
        "RunRefused",
        "Databricks rejected the run (INVALID_PARAMETER_VALUE, HTTP 400): read the log of the operator, and create a FineTuneJob with another name and a corrected "
        "spec.data.prepare.spark.databricks",
    ),
    "no right to submit": (
        denied("POST /api/2.2/jobs"),
        None,
        "DatabricksForbidden",
        "Databricks at {uri} denied the operator permission to submit a run: grant the permission, or use other credentials "
        "(PERMISSION_DENIED, HTTP 403)",
    ),
    "no right to write": (
        denied("PUT /api/2.0/fs"),
        None,
        "DatabricksForbidden",
        f"Databricks at {{uri}} denied the operator permission to write to volume {VOLUME}/finetune: grant the permission, or use "
        "other credentials (PERMISSION_DENIED, HTTP 403)",
    ),
    "no volume": (
        without_volume,
        None,
        "DatabricksError",
        f"volume {VOLUME}/finetune does not exist in Databricks, or is not visible to the operator: create the "
        "volume, or grant READ VOLUME and WRITE VOLUME (NOT_FOUND, HTTP 404)",
    ),
    "no login": (
        without_login,
        None,
        "DatabricksForbidden",
        "Databricks at {uri} rejected the credentials: check the Secret that secretRef names (HTTP 401)",
    ),
    "a cluster that ends": (
        with_a_cluster_that_ends,
        GONE,
        "DatabricksError",
        "Databricks at {uri} failed to submit a run (INVALID_STATE, HTTP 400): see the log of the operator for the reason",
    ),
    "away": (
        away,
        None,
        "DatabricksUnreachable",
        "Databricks at {uri} is too busy to submit a run: TEMPORARILY_UNAVAILABLE, HTTP 503",
    ),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(desk: Desk, case: tuple[Callable[[Workspace], None], Json | None, str, str]) -> None:
    broken, compute, reason, sentence = case
    broken(desk.state)
    with pytest.raises(ExternalError) as refused:
        desk.submit(submission(compute))
    assert (refused.value.problem.reason, refused.value.problem.message) == (
        reason,
        sentence.format(uri=desk.state.uri),
    )


def test_a_refusal_shows_no_credentials(desk: Desk) -> None:
    (token,) = desk.state.tokens
    answer = {"error_code": "INVALID_PARAMETER_VALUE", "message": f"HF_TOKEN={token} is not allowed"}
    desk.state.faults.append(Fault(400, answer, path="/api/2.2/jobs"))
    with pytest.raises(ExternalError) as refused:
        desk.submit()
    assert refused.value.problem.message.startswith(
        "Databricks rejected the run (INVALID_PARAMETER_VALUE, HTTP 400): "
    )


def test_the_error_of_a_run_shows_no_credentials(desk: Desk) -> None:
    (token,) = desk.state.tokens
    run_id = desk.submit()
    encoded = base64.b64encode(f"user:{token}".encode()).decode()
    error = f"git clone https://me:pa55word@host failed: {token}, Basic {encoded}"
    desk.state.jobs.end(int(run_id), Code.RUN_EXECUTION_ERROR, "Workload failed", error)
    assert desk.read(run_id).message == "git clone https://me:***@host failed: ***, Basic ***"


def test_an_operator_without_a_wheel_says_so(desk: Desk) -> None:
    (desk.wheels / NAME).unlink()
    with pytest.raises(ExternalError) as refused:
        desk.submit()
    assert refused.value.problem.reason == "DatabricksNotConfigured"


REPORT = RunReport(
    exit_code=65, message=TerminationMessage(error=PodError(reason="NoRows", message="it has no rows"))
)
ENDS: dict[str, tuple[Code, str, str, bytes, Json]] = {
    "success": (Code.SUCCESS, "", "", b'{"exitCode": 0}', {"word": "Succeeded", "report": RunReport(exit_code=0)}),
    "half a report": (Code.SUCCESS, "", "", b'{"exitCo', {"word": "Succeeded"}),
    "an error with a report": (
        Code.RUN_EXECUTION_ERROR, "Workload failed", "NoRows: it has no rows", REPORT.model_dump_json().encode(),
        {"word": "Failed", "report": REPORT},
    ),
    "an error without one": (
        Code.RUN_EXECUTION_ERROR, "Workload failed", "ModuleNotFoundError: no transformers", b"",
        {"word": "Failed", "message": "ModuleNotFoundError: no transformers"},
    ),
    "a driver that is lost": (
        Code.DRIVER_ERROR, "The driver is lost", "", b"", {"word": "Failed", "message": "The driver is lost"},
    ),
    "a cluster that cannot be": (
        Code.INVALID_CLUSTER_REQUEST, "Node type i3 is not supported", "", b"",
        {"word": "Failed", "message": "Node type i3 is not supported", "is_final": True},
    ),
    "canceled": (Code.USER_CANCELED, "Run cancelled.", "", b"", {"word": "Canceled"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
def test_ends(desk: Desk, case: tuple[Code, str, str, bytes, Json]) -> None:
    code, message, error, report, expected = case
    run_id = desk.submit()
    if report:
        desk.state.files.write(f"{FOLDER}/report.json", report)
    desk.state.jobs.end(int(run_id), code, message, error)
    url = f"{desk.state.uri}/?o=1234#job/0/run/{run_id}"
    parts: Json = {"run_id": run_id, "url": url} | expected
    assert desk.read(run_id) == Run(**parts)


FINAL = {
    Code.UNAUTHORIZED_ERROR,
    Code.INVALID_CLUSTER_REQUEST,
    Code.INVALID_RUN_CONFIGURATION,
    Code.RESOURCE_NOT_FOUND,
    Code.FEATURE_DISABLED,
    Code.DISABLED,
}
WORDS = {Code.SUCCESS: "Succeeded", Code.CANCELED: "Canceled", Code.USER_CANCELED: "Canceled"}


@pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
def test_what_a_run_would_end_with_again(desk: Desk, code: Code) -> None:
    run_id = desk.submit()
    desk.state.jobs.end(int(run_id), code, "The run may not do this")
    run = desk.read(run_id)
    assert (run.word, run.is_final) == (WORDS.get(code, "Failed"), code in FINAL)


def test_the_way_to_the_end(desk: Desk) -> None:
    run_id = desk.submit()
    state, words = desk.state.jobs.held[int(run_id)], []
    desk.state.files.write(f"{FOLDER}/progress.txt", b"writing 40%")
    for life in (Life.QUEUED, Life.PENDING, Life.RUNNING):
        state.life = life
        run = desk.read(run_id)
        words.append((run.word, run.progress))
    runs.cancel(desk.client, run_id)
    words.append((desk.read(run_id).word, ""))
    assert words == [("Pending", ""), ("Pending", ""), ("Running", "writing 40%"), ("Canceling", "")]


def peak_of(call: Callable[[], object]) -> int:
    """The bytes of memory that a call takes at most; the stand-in, in the same process, copies nothing."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_files_of_any_size_take_no_memory(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(150 * 2**20)
    run_id = desk.submit()
    running = desk.state.jobs.held[int(run_id)]
    running.life = Life.RUNNING
    desk.read(run_id)  # imports, and the token
    monkeypatch.setattr(Files, "read", lambda *_: content)
    runs_read: list[Run] = []
    peaks = [peak_of(lambda: runs_read.append(desk.read(run_id)))]
    running.life = Life.TERMINATED
    for code in (Code.SUCCESS, Code.RUN_EXECUTION_ERROR):
        desk.state.jobs.end(int(run_id), code, "Workload failed", "NoRows: it has no rows")
        peaks.append(peak_of(lambda: runs_read.append(desk.read(run_id))))
    assert max(peaks) < 2**20
    progress = f"{FOLDER}/progress.txt is larger than 65536 bytes: the operator does not read it"
    report = f"{FOLDER}/report.json is larger than 65536 bytes, so it is not the report of a preparation: find out what writes to this folder"
    assert [(run.word, run.progress, run.message, run.report) for run in runs_read] == [
        ("Running", progress, "", None),
        ("Succeeded", "", report, None),
        ("Failed", "", report, None),
    ]


@pytest.mark.parametrize("size", [2**16, 2**16 + 1])
def test_the_largest_file_that_is_read(desk: Desk, size: int) -> None:
    run_id = desk.submit()
    desk.state.jobs.held[int(run_id)].life = Life.RUNNING
    desk.state.files.write(f"{FOLDER}/progress.txt", b"x" * size)
    assert (desk.read(run_id).progress == "x" * size) is (size == 2**16)


def test_a_run_is_found_by_its_name_while_it_is_active(desk: Desk) -> None:
    run_id = desk.submit()
    names = ("finetune-prep team/tune uid 1", "finetune-prep team/tune uid 2")
    assert [runs.find(desk.client, name) for name in names] == [run_id, None]
    desk.state.jobs.end(int(run_id), Code.SUCCESS)
    assert runs.find(desk.client, names[0]) is None


def test_a_run_that_is_gone_has_failed_and_needs_no_cancel(desk: Desk) -> None:
    runs.cancel(desk.client, "77")
    assert desk.read("77") == Run("77", "Failed", message="run 77 no longer exists in the workspace")
