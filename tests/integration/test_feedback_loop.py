"""The sample feedback-loop, whole: the answers of a served champion and the feedback on them train the version that replaces it.

The operator, the API server, MLflow's client, the SDK of Databricks and the preparation are real. The workspace is a stand-in, and the
pods are played: the losses are the test's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from finetune_crds.contract import TerminationMessage, TrainResult
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.recipe import Recipe
from finetune_operator.names import scheduled_job_name
from finetune_operator.text import format_time
from fixtures import inference_tables
from fixtures.operator_processes.databricks import create_secret, world_with_wheel, write_table
from fixtures.operator_processes.world import World
from support.api import Api
from support.jars import jars_folder
from support.mlflow_server import Mlflow
from support.waiting import wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    # NB: imported by the fixtures alone: the SDK of Databricks takes a second to import, in each worker.
    from fixtures.fake_databricks import Workspace

Json = dict[str, Any]
SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "feedback-loop.yaml"
MODEL, ENDPOINT, SCHEDULE, PROMOTION = (
    "ml.prod.assistant",
    "assistant",
    "assistant-feedback",
    "assistant-champion",
)
# Spark's own catalog on this machine has no third level.
REQUESTS, FEEDBACK = "inference.assistant_payload", "inference.feedback"
TOKENS = {"databricks": "dapi-good", "databricks-trainer": "dapi-trainer"}
SIGNATURE = {"inputs": '[{"type": "string"}]', "outputs": '[{"type": "string"}]'}
CORRECTION = "Count one further: {}."


@dataclass
class Loop:
    """The objects of the sample in a namespace, and the workspace with its two tables."""

    world: World
    workspace: Workspace
    folder: Path
    starts: int = 0

    def status(self, kind: str, name: str) -> Json:
        return dict((self.world.api.get(kind, self.world.namespace, name) or {}).get("status") or {})

    def promotion(self) -> Json:
        return self.status("ModelPromotion", PROMOTION)

    def wait_scheduled(self, reason: str) -> Json:
        """The status of the schedule, once its condition Ready has this reason."""

        def seen() -> Json | None:
            status = self.status("FineTuneSchedule", SCHEDULE)
            reasons = {item["type"]: item["reason"] for item in status.get("conditions", [])}
            return status if reasons.get("Ready") == reason else None

        return wait_for(f"the schedule is {reason}", seen, self.world.patience)

    def wait_served(self, version: str) -> None:
        def is_served() -> bool:
            return self.workspace.endpoints.shares.get(ENDPOINT, [])[-1:] == [{version: 100}]

        wait_for(f"version {version} is served", is_served, self.world.patience, instead=self.promotion)

    def answer(self, numbers: Sequence[int]) -> None:
        """Play the AI Gateway, which logs the answers of the endpoint."""
        answers = {
            f"request-{number}": (f"What is {number} plus one?", f"It is {number + 1}.") for number in numbers
        }
        write_table(self.folder / REQUESTS, inference_tables.build_requests(answers))

    def rate(self, numbers: Sequence[int], correction: str | None = None) -> None:
        """Play the application: people like these answers, or correct them."""
        corrections = {
            f"request-{number}": correction.format(number + 1) if correction else None for number in numbers
        }
        write_table(self.folder / FEEDBACK, inference_tables.build_feedback(corrections))

    def register(self, run_id: str = "", tags: Json | None = None) -> str:
        """Play the trainer: register a version with its tokenizer."""
        pairs = [{"key": key, "value": value} for key, value in (tags or {}).items()]
        body = {"name": MODEL, "run_id": run_id, "run_tracking_server_id": self.workspace.workspace_id}
        version = str(self.workspace.create_version({**body, "tags": pairs})["model_version"]["version"])
        folder = f"/Models/{MODEL.replace('.', '/')}/{version}"
        for path in (self.folder / "tokenizer").iterdir():
            self.workspace.files.write(f"{folder}/components/tokenizer/{path.name}", path.read_bytes())
        self.workspace.files.write(f"{folder}/MLmodel", f"signature: {SIGNATURE}".encode())
        self.workspace.finalize_version(MODEL, version)
        return version

    def start_job(self) -> str:
        """Set the schedule to a start time that has just passed, and return the name of its job."""
        self.starts += 1
        time = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=60 - 10 * self.starts)
        spec = {"schedule": f"{time.minute} {time.hour} * * *", "suspend": False}
        self.world.api.patch("FineTuneSchedule", self.world.namespace, SCHEDULE, {"spec": spec})
        return scheduled_job_name(SCHEDULE, time)

    def prepare(self, job: str) -> None:
        """Play the workspace: run the preparation of a job in this process."""
        from databricks.sdk.service.jobs import TerminationCodeCode

        from finetune_trainer.prep import databricks

        def find_run() -> int:
            return int(self.status("FineTuneJob", job).get("databricksRun", {}).get("runId", 0))

        run_id = wait_for(f"the run of {job}", find_run, self.world.patience)
        task = self.workspace.jobs.held[run_id].task.python_wheel_task
        assert task
        # NB: a run sees volumes at /Volumes; this machine has them in a folder.
        volumes = f"{self.workspace.files.folder}/Volumes/"
        databricks.main([item.replace("/Volumes/", volumes, 1) for item in task.parameters or []])
        self.workspace.jobs.end(run_id, TerminationCodeCode.SUCCESS)

    def train(self, job: str, *, loss: float, base_loss: float) -> Recipe:
        """Play the pods of a job, which register a version, and evaluate it and its base on the test split; the recipe of the training."""
        from finetune_trainer.train.delivery.lineage import build_source_tags

        self.world.run_pods(f"{job}-train-1", 1)
        status = self.world.wait_phase(job, "Training")
        config = self.world.api.get("ConfigMap", self.world.namespace, f"{job}-train")
        assert config
        recipe = Recipe.model_validate(yaml.safe_load(config["data"]["recipe.yaml"]))
        assert recipe.data.splits
        self.register(status["mlflow"]["runId"], build_source_tags(recipe, recipe.data.splits, "validation"))
        result = TrainResult(step=10, base_eval_loss=base_loss, eval_loss=loss)
        self.world.end_pods(f"{job}-train-1", [0], [TerminationMessage(train=result)])
        self.world.run_pods(f"{job}-evaluate", 1)
        evaluation = EvaluationResult(
            rows=status["data"]["rows"]["test"],
            digest=f"test split of {status['data']['digest']}",
            metrics={"evaluation_loss": loss},
            base={"evaluation_loss": base_loss},
        )
        self.world.end_pods(f"{job}-evaluate", [0], [TerminationMessage(evaluation=evaluation)])
        self.world.wait_phase(job, "Succeeded")
        return recipe


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace with a model, whose runs the test plays."""
    from fixtures.fake_databricks import Workspace, running
    from support.small_tokenizer import save_tokenizer

    state = Workspace(tokens={*TOKENS.values()})
    state.jobs.runs_wheels = False
    state.files.volumes.add("/Volumes/support/finetuning/work")
    state.create_model(MODEL)
    save_tokenizer(tmp_path / "tokenizer")
    with running(state):
        state.tracking.open()
        yield state


@pytest.fixture
def spark(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    """The session of the workspace's runs, in a process that is logged in as they are. Rows are computed once, and kept in memory."""
    from finetune_trainer.prep import pipeline
    from finetune_trainer.prep.spark import session
    from support import quick_session, spark_jvm

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        # NB: the preparation sets the variables, which end with this test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for folder in ("lake", "scratch"):
        (tmp_path / folder).mkdir()
    bucket = {
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
        # NB: with a link for the whole bucket, Spark does not find the files of a table's earlier versions.
        "spark.hadoop.fs.viewfs.mounttable.lake.link./finetune": f"file://{tmp_path}/lake",
    }
    environment = {session.ENV_JARS: str(jars_folder()), **spark_jvm.build_environment()}
    for name, value in (environment | workspace.secret).items():
        monkeypatch.setenv(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        run_session = quick_session.start(settings=bucket)
    monkeypatch.setenv(session.ENV_RUNTIME, "17.3")
    monkeypatch.setattr(pipeline, "keep", lambda frame, _: collect(frame))
    yield run_session
    quick_session.stop(run_session)


def collect(frame: DataFrame) -> DataFrame:
    """The rows of a frame, with the metadata of its columns."""
    return frame.sparkSession.createDataFrame(frame.toArrow(), frame.schema)


@pytest.fixture
def operated_world(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> Iterator[World]:
    """A namespace whose operator has the wheel."""
    with world_with_wheel(api, kubeconfig, mlflow_server, namespace, tmp_path) as world:
        yield world


@pytest.fixture
def loop(operated_world: World, workspace: Workspace, spark: SparkSession, tmp_path: Path) -> Loop:
    """The objects of the sample, and a champion with answers and feedback. The schedule is suspended."""
    api, namespace = operated_world.api, operated_world.namespace
    for name, token in TOKENS.items():
        create_secret(api, namespace, name, {"DATABRICKS_HOST": workspace.uri, "DATABRICKS_TOKEN": token})
    loop = Loop(operated_world, workspace, tmp_path)
    workspace.set_alias(MODEL, "champion", int(loop.register()))
    loop.answer(range(60))
    loop.rate(range(30))
    loop.rate(range(30, 50), CORRECTION)
    spark.sql("CREATE DATABASE inference")
    for name in (REQUESTS, FEEDBACK):
        spark.sql(f"CREATE TABLE {name} USING delta LOCATION '{tmp_path / name}'")
    schedule, promotion = yaml.safe_load_all(SAMPLE.read_text(encoding="utf-8"))
    data = schedule["spec"]["jobTemplate"]["spec"]["data"]
    data["source"]["table"], data["source"]["feedback"]["table"] = REQUESTS, FEEDBACK
    # Samples in the report and the rules of other redactions take longer to plan than so few rows to prepare.
    data["prepare"] |= {"reportSamples": 0, "redact": ["Email"]}
    schedule["spec"]["suspend"] = True
    for body in (schedule, promotion):
        api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})
    loop.wait_scheduled("Suspended")
    missed = {"lastScheduleTime": format_time(datetime.now(UTC) - timedelta(days=2))}
    api.patch("FineTuneSchedule", namespace, SCHEDULE, {"status": missed}, status=True)
    return loop


def read_splits(loop: Loop, version: int) -> list[Json]:
    """The rows that a preparation wrote."""
    from deltalake import DeltaTable

    table = DeltaTable(loop.folder / "lake" / "assistant-feedback" / "splits", version=version)
    return list(table.to_pyarrow_table(columns=["messages", "split"]).to_pylist())


def test_feedback_trains_the_next_champion_until_one_is_worse(loop: Loop) -> None:
    world, workspace, aliases = loop.world, loop.workspace, loop.workspace.models[MODEL].aliases
    loop.wait_served("1")

    def table_prefix() -> str | None:
        gateway = workspace.endpoints.held[ENDPOINT].ai_gateway
        table = gateway.inference_table_config if gateway else None
        return table.table_name_prefix if table else None

    wait_for("its requests are logged", lambda: table_prefix() == "assistant", world.patience)

    # A better version on the same rows.
    first = loop.start_job()
    loop.prepare(first)
    recipe = loop.train(first, loss=1.5, base_loss=2.0)
    assert recipe.model.base == f"models:/{MODEL}/1"
    data = world.status(first)["data"]
    assert {item["step"]: item["rows"] for item in data["dropped"] if item["rows"]} == {"noFeedback": 10}
    rows = read_splits(loop, data["version"])
    learned = [row["messages"][-1]["content"] for row in rows]
    liked, corrected = range(30), range(30, 50)
    assert sorted(learned) == sorted(
        [f"It is {number + 1}." for number in liked] + [CORRECTION.format(number + 1) for number in corrected]
    )
    assert data["rows"]["test"] == [row["split"] for row in rows].count("test") > 0
    loop.wait_served("2")
    assert aliases == {"candidate": 2, "champion": 2}
    [verdict] = loop.promotion()["gates"]["verdicts"]
    assert verdict["message"] == (
        "evaluation_loss is 1.5, which meets <= 1.98, since version 1, which has the alias, has 2 on the same rows"
    )

    # More requests, and no feedback on them: the data is that from which the champion comes.
    loop.answer(range(100, 120))
    second = loop.start_job()
    loop.prepare(second)
    skipped = loop.wait_scheduled("DataUnchanged")
    assert (skipped["data"]["job"], skipped["data"]["digest"]) == (first, data["digest"])
    assert world.api.get("Job", world.namespace, f"{second}-train-1") is None

    # New feedback, and a version that is worse than the champion on the same rows.
    loop.rate(range(50, 60))
    third = loop.start_job()
    loop.prepare(third)
    recipe = loop.train(third, loss=1.4, base_loss=1.2)
    assert recipe.model.base == f"models:/{MODEL}/2"
    assert len(read_splits(loop, world.status(third)["data"]["version"])) == 60
    wait_for(
        "a refusal", lambda: loop.promotion()["phase"] == "Refused", world.patience, instead=loop.promotion
    )
    [verdict] = loop.promotion()["gates"]["verdicts"]
    assert verdict["message"] == (
        "evaluation_loss is 1.4, which does not meet <= 1.188, since version 2, which has the alias, has 1.2 on the same rows"
    )
    assert aliases == {"candidate": 3, "champion": 2}
    assert workspace.endpoints.shares[ENDPOINT] == [{"1": 100}, {"2": 100}]
    assert sorted(item["metadata"]["name"] for item in world.api.list("FineTuneJob", world.namespace)) == [
        first,
        third,
    ]
