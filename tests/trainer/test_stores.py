"""Whole runs on stores: splits, checkpoints and models in servers with the APIs of S3, Google Cloud Storage, Azure, Databricks."""

from __future__ import annotations

import json
import multiprocessing
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from cluster import object_stores
from finetune_crds.contract import ENV_ATTEMPT, TAG_DATA_PATH, TAG_DATA_VERSION
from finetune_crds.data import Splits
from finetune_crds.recipe import JobReference
from finetune_trainer.models import download
from finetune_trainer.models.object_store import StoredModel
from finetune_trainer.models.output_folder import ModelFolder
from finetune_trainer.pod.exit_status import PodFailure, SupersededError
from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint.folder import CheckpointFolder
from finetune_trainer.train.data import read
from fixtures import fake_databricks, fake_s3
from fixtures.fake_databricks.tables import Tables
from support import networks
from support.checkpoints import Run, same
from support.forged_checkpoints import FORGERIES
from support.pods import examples
from support.trackers import read_events
from support.training import eval_loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from fsspec import AbstractFileSystem

    from cluster.object_stores import Store
    from support.pods import Outcome, Pod
    from support.training import Mlflow


# MLflow modules warn about each other while the export imports them.
pytestmark = pytest.mark.usefixtures("mlflow_imported")


@pytest.fixture(scope="module", params=["s3", "gs", "azure"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with an empty bucket."""
    with getattr(object_stores, request.param)(tmp_path_factory.mktemp("store")) as store_server:
        yield store_server


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, with a login in the variables of this process."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


def test_a_job_begins_goes_on_and_ends_in_a_store(
    store: Store, pod: Pod, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, bucket = filesystems.open_filesystem(store.uri)
    files.put(f"{table}/", f"{bucket}/splits/", recursive=True)
    begins_goes_on_and_ends(
        store.uri, pod.but({"data.splits.path": f"{store.uri}/splits"}), tmp_path / "fetched", capsys
    )


@pytest.mark.parametrize(("forge", "sentence"), FORGERIES)
def test_a_forged_checkpoint_in_a_store_runs_no_code(
    store: Store,
    tmp_path: Path,
    forge: Callable[[AbstractFileSystem, str, Path], None],
    sentence: str,
) -> None:
    uri = f"{store.uri}/forged-{forge.__name__}"
    with networks.alone() as world:
        run = Run(uri, world)
        run.train_and_save(1)
        again = Run(uri, world)
        assert again.resume().step == 1
        assert same(again.state(), run.state())
        (save,) = CheckpointFolder(run.checkpointer.folder).list_saves()
        files, path = filesystems.open_filesystem(save.uri)
        forge(files, path, tmp_path / "proof")
        with pytest.raises(PodFailure) as caught:
            Run(uri, world).resume()
    assert not (tmp_path / "proof").exists()
    assert (caught.value.exit_code, caught.value.reason) == (64, "CheckpointUnsafe")
    assert f"{run.checkpointer.folder}/step-00000001 is unsafe ({sentence}" in caught.value.message


def test_a_job_begins_goes_on_and_ends_in_a_volume_of_unity_catalog(
    pod: Pod, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = "/Volumes/main/llm/work"
    with fake_databricks.running() as workspace:
        workspace.files.volumes.add(volume)
        for name, value in workspace.secret.items():
            monkeypatch.setenv(name, value)
        begins_goes_on_and_ends(volume, pod, tmp_path / "fetched", capsys)


def test_a_job_goes_on_with_the_versions_of_its_tables_of_unity_catalog(
    pod: Pod,
    mlflow: Mlflow,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    splits = ("train", "validation")

    def write(rows: list[dict[str, Any]]) -> None:
        for split in splits:
            split_rows = [
                {name: row[name] for name in ("prompt", "response")} for row in rows if row["split"] == split
            ]
            write_deltalake(tmp_path / "lake" / split, pa.Table.from_pylist(split_rows), mode="overwrite")

    write(examples())
    with serving_tables(tmp_path, splits) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        first = pod.but(
            {
                "data.splits": {"type": "Tables"} | {split: f"main.support.{split}" for split in splits},
                "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 2},
                "training.maxSteps": 2,
            }
        )
        first.env |= mlflow.env
        ended(first, capsys)
        # Each split has other rows now.
        write([{**row, "response": "No."} for row in examples()])
        second = ended(first.but({"training.maxSteps": 4}), capsys)
    assert "resuming from the checkpoint of step 2" in second.output
    assert "train: using the tokens of an earlier attempt" in second.output
    run = mlflow.client().get_run(mlflow.run_id)
    assert run.data.tags[TAG_DATA_PATH] == "main.support.train"
    assert run.data.tags[TAG_DATA_VERSION] == "train=0,validation=0"
    datasets = {used.dataset.name: json.loads(used.dataset.source) for used in run.inputs.dataset_inputs}
    assert {name: source["delta_table_name"] for name, source in datasets.items()} == {
        f"main.support.{split}": f"main.support.{split}" for split in splits
    }


@contextmanager
def serving_tables(folder: Path, splits: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """A workspace and the store of its tables, in a process of their own; the variables with which a pod finds both.

    NB: deltalake keeps Python's lock while it waits for the history of a table, so a thread of this process could not answer.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve_tables, args=(theirs, folder, splits), daemon=True)
    server.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        server.join()


def _serve_tables(connection: Connection, folder: Path, splits: tuple[str, ...]) -> None:
    with fake_s3.running(fake_s3.Store(folder)) as store:
        tables = Tables(store=store)
        for split in splits:
            tables.add(f"main.support.{split}", f"s3://lake/{split}")
        with fake_databricks.running(fake_databricks.Workspace(tables=tables)) as workspace:
            connection.send(workspace.secret | {"AWS_ENDPOINT_URL": store.uri, "AWS_REGION": "us-east-1"})
            connection.recv()


def begins_goes_on_and_ends(place: str, pod: Pod, to: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, adapter = f"{place}/models/tiny", f"{place}/models/adapter"
    first = pod.but(
        {
            "checkpoint": {"uri": f"{place}/checkpoints", "everySteps": 2},
            "training.maxSteps": 2,
            "tracking.sinks": [{"type": "TensorBoard", "uri": f"{place}/tensorboard"}],
        }
    )
    ended(first, capsys)
    second = ended(first.but({"training.maxSteps": 4, "output": {"uri": model}}), capsys)
    assert "resuming from the checkpoint of step 2" in second.output
    assert f"wrote the model to {model}" in second.output
    files, events = filesystems.open_filesystem(f"{place}/tensorboard/tests-tiny-01234567")
    for name in filesystems.list_files(files, events):
        files.get_file(name, str(to.parent / name.rpartition("/")[2]))
    assert [step for step, _ in read_events(to.parent)["loss"]] == [1, 2, 3, 4]
    # Another job goes on from that model, and leaves an adapter that names it.
    other_job = first.but(
        {
            "job.uid": "another",
            "model.base": model,
            "checkpoint": None,
            "method": {"type": "LoRA"},
            "output": {"uri": adapter},
        }
    )
    third = ended(other_job, capsys)
    assert third.message is not None
    assert third.message.train is not None
    assert third.message.train.base_eval_loss == pytest.approx(eval_loss_of(second), rel=1e-5)
    source = download.fetch(adapter, to)
    assert (source.adapter is not None, source.adapter_of) == (True, model)


def ended(pod: Pod, capsys: pytest.CaptureFixture[str]) -> Outcome:
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    return outcome


def test_a_folder_that_a_console_made_is_empty(store: Store, tmp_path: Path) -> None:
    uri = f"{store.uri}/console/tiny"
    files, path = filesystems.open_filesystem(uri)
    if store.uri.startswith("s3"):
        # NB: s3fs cuts the slash off.
        files.call_s3("put_object", Bucket="lake", Key="console/tiny/", Body=b"")
    elif store.uri.startswith("gs"):
        files.pipe_file(f"{path}/", b"")
    job = JobReference(name="tiny", namespace="tests", uid="0001")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = ModelFolder(uri, job, 1)
    folder.claim()
    folder.publish({"": tmp_path / "model"})
    # What else lies there is not downloaded with the model.
    files.pipe_file(f"{path}/optimizer.pt", b"state")
    assert [*StoredModel.find(uri).entries] == [f"{path}/config.json"]
    download.fetch(uri, tmp_path / "to")


def test_a_model_that_is_written_again_has_nothing_of_the_earlier_one(store: Store, tmp_path: Path) -> None:
    uri = f"{store.uri}/again"
    files, path = filesystems.open_filesystem(uri)
    job = JobReference(name="tiny", namespace="tests", uid="0001")
    for attempt, names in enumerate((["config.json", "base/config.json", "index"], ["config.json"]), start=1):
        for name in names:
            (tmp_path / str(attempt) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(attempt) / name).write_text("{}")
        to = ModelFolder(uri, job, attempt)
        to.claim()
        to.publish({"": tmp_path / str(attempt)})
    assert sorted(files.find(path)) == [f"{path}/config.json", f"{path}/finetune_model.json"]


def test_of_several_writers_of_a_new_file_one_writes_it(store: Store) -> None:
    files, path = filesystems.open_filesystem(f"{store.uri}/new")
    filesystems.create_file(files, path, b"first")
    with pytest.raises(FileExistsError):
        filesystems.create_file(files, path, b"second")
    assert files.cat_file(path) == b"first"


def test_two_generations_of_pods_write_one_checkpoint_folder(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complete = two_generations_write_one_folder(f"{store.uri}/generations", monkeypatch, tmp_path)
    # The marker of the older pods lists shards that are gone.
    assert complete == [1, 2]


def test_two_generations_of_pods_write_one_folder_in_a_volume_of_unity_catalog(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume = "/Volumes/main/llm/work"
    with fake_databricks.running() as workspace:
        workspace.files.volumes.add(volume)
        for name, value in workspace.secret.items():
            monkeypatch.setenv(name, value)
        complete = two_generations_write_one_folder(volume, monkeypatch, tmp_path)
    # There is no folder for the marker of the older pods.
    assert complete == [2]


def two_generations_write_one_folder(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The older pods are paused between their last look at the manifest and their marker; the newer ones delete their shards.

    Returns the attempts whose marker of step 2 exists then.
    """
    publish = CheckpointFolder.publish
    newer: list[Run] = []

    def publish_late(folder: CheckpointFolder, *content: Any) -> None:
        monkeypatch.setattr(CheckpointFolder, "publish", publish)
        monkeypatch.setenv(ENV_ATTEMPT, "2")
        newer.append(Run(uri, world))
        newer[0].resume()
        newer[0].train_and_save(1)
        publish(folder, *content)

    with networks.alone() as world:
        monkeypatch.setenv(ENV_ATTEMPT, "1")
        older = Run(uri, world)
        older.train_and_save(1)
        older.train()
        monkeypatch.setattr(CheckpointFolder, "publish", publish_late)
        with pytest.raises(SupersededError):
            older.save()
        checkpoints = CheckpointFolder(older.checkpointer.folder)
        saves = checkpoints.list_complete(checkpoints.list_saves(2))
        untouched = Run(tmp_path, world)
        untouched.train_and_save(2)
        again = Run(uri, world)
        assert again.resume().step == 2
        assert same(again.state(), untouched.state())
        again.train_and_save(2)
        untouched.train_and_save(2)
        assert same(again.state(), untouched.state())
        assert [(save.step, save.attempt) for save in checkpoints.list_saves()] == [(3, 2), (4, 2)]
    return [save.attempt for save in saves]


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(PodFailure) as failed:
        call()
    return failed.value.reason, failed.value.message


def test_what_a_store_refuses_is_one_sentence(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, place = f"{store.missing}/tiny", f"{store.uri}/tiny"
    job = JobReference(name="tiny", namespace="tests", uid="0001")
    sentences = [
        refusal(lambda: download.fetch(missing, tmp_path / "to")),
        refusal(ModelFolder(missing, job, 1).claim),
    ]
    for name, value in store.wrong.items():
        monkeypatch.setenv(name, value)
    if store.wrong:
        sentences += [
            refusal(lambda: download.fetch(place, tmp_path / "to")),
            refusal(ModelFolder(place, job, 1).claim),
        ]
    expected = [
        ("ModelNotFound", f"model.base {missing} does not exist: correct the bucket or the folder"),
        (
            "OutputNotFound",
            f"output.uri {missing} does not exist: create the bucket, or correct output.uri",
        ),
        (
            "ModelForbidden",
            f"model.base {place} cannot be read with the pod's credentials: grant these credentials access",
        ),
        (
            "OutputForbidden",
            f"output.uri {place} cannot be written with the pod's credentials: grant these credentials access",
        ),
    ]
    assert sentences == expected[: len(sentences)]
    if store.wrong:
        # The store's own words are after the name.
        files, table = (Splits(type="Parquet", train=place), Splits(type="Delta", path=place))
        refusals = [refusal(lambda: read.read_schema(files)), refusal(lambda: read.pin_versions(table))]
        assert [(reason, message.split(" cannot be read: ")[0]) for reason, message in refusals] == [
            ("DataUnreadable", place),
            ("DataUnreadable", f"the Delta table {place}"),
        ]
