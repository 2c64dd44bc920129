"""register.upload on real MLflow servers, whose artifacts are in S3 or in a folder."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cluster import object_stores
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.delivery import upload
from finetune_trainer.train.delivery.register import Registry
from support.http_server import Answer
from support.http_server import serving as serving_http
from support.mlflow_server import Mlflow
from support.training import new_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_crds.tracking import Upload

pytestmark = pytest.mark.usefixtures("mlflow_imported")


@contextmanager
def serving(mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of a server that runs as long as the block does."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    mlflow.start()
    try:
        run = mlflow.post("runs/create", {"experiment_id": "0", "start_time": 0})
        yield str(run["run"]["info"]["run_id"])
    finally:
        mlflow.stop()


def refusal(way: Upload, run: str) -> str:
    with pytest.raises(RecipeRefusedError) as refused:
        upload.check(way, run)
    return refused.value.message


def test_large_files_go_past_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(upload._MIN_MULTIPART_BYTES))
    (model / "config.json").write_text("{}")
    for name in (upload._ENABLED_VARIABLE, upload._MIN_BYTES_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    sentences = {}
    with object_stores.s3(tmp_path / "store") as store:
        server = Mlflow(tmp_path / "mlflow", artifacts=f"{store.uri}/artifacts", environment=store.env)
        with serving(server, monkeypatch) as first:
            second = str(
                server.post("runs/create", {"experiment_id": "0", "start_time": 0})["run"]["info"]["run_id"]
            )
            runs: dict[Upload, str] = {"Proxy": first, "Direct": second}
            for way, run in runs.items():
                before = len(server.log.read_text())
                upload.check(way, run)
                upload.configure_client(way)
                Registry(run, way).upload(model)
                log = server.log.read_text()[before:]
                sentences[way] = [
                    "PUT" if "PUT" in line else "signed"
                    for line in log.splitlines()
                    if ("PUT" in line and "model.safetensors" in line) or "mpu/complete" in line
                ]
    assert sentences == {"Proxy": ["PUT"], "Direct": ["signed"]}


def test_a_way_that_the_server_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_template: Path
) -> None:
    with serving(Mlflow(tmp_path / "mlflow"), monkeypatch) as run:
        upload.check("Proxy", run)
        wrong = (
            "register.upload Direct requires an MLflow server that creates signed URLs for its artifact store"
        )
        assert refusal("Direct", run).startswith(wrong)
        # One that was away then says so before the upload: MLflow's client would send the files to the server.
        model = tmp_path / "model"
        model.mkdir()
        (model / "model.safetensors").write_text("weights")
        with pytest.raises(RecipeRefusedError, match=wrong):
            Registry(run, "Direct", patience_seconds=5).upload(model)
        assert not [*(tmp_path / "mlflow").rglob("model.safetensors")]
    (tmp_path / "mlflow.db").write_bytes(mlflow_template.read_bytes())
    run_id = new_run(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", run_id.uri)
    upload.check("Direct", run_id.run_id)
    assert refusal("Proxy", run_id.run_id) == (
        f"register.upload Proxy requires an MLflow server that serves artifacts, but pods write to {(tmp_path / 'artifacts').as_uri()}/{run_id.run_id}/artifacts directly: remove the field"
    )


def test_a_server_may_take_its_time_to_write_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers after the store has the whole file, when the client has long given up on other calls."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    never = threading.Event()

    def slowly(_: object) -> Answer:
        never.wait(1.5)
        return Answer(200, {})

    with serving_http(slowly) as address:
        repository = HttpArtifactRepository(f"{address}/api/2.0/mlflow-artifacts/artifacts/1")
        with pytest.raises(MlflowException, match="timed out"):
            repository.log_artifact(str(tmp_path / "model.safetensors"))
        with upload.allow_slow_uploads():
            repository.log_artifact(str(tmp_path / "model.safetensors"))
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"


def test_a_server_that_is_away_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    upload.check("Direct", "0123")
    assert capsys.readouterr().out.startswith(
        "cannot check whether the MLflow server supports register.upload Direct: "
    )
