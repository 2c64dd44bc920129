"""What a person does from this machine: in MLflow and in the object store, each through `kubectl port-forward`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlflow.artifacts
import pytest
from deltalake import DeltaTable
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from demo.install import NAMESPACE, RELEASE, SYSTEM, Installation
from demo.kubectl import Kubectl
from demo.place import TESTS
from support.waiting import wait_for

JUDGE = Path(__file__).parent / "judge.py"
# NB: MLflow's client would fetch files from the object store itself, at an address inside the cluster.
_THROUGH_THE_SERVER = ("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")
_OF_ANOTHER_JOB = ("finetune.dev/uid", "finetune.dev/job", "finetune.dev/attempt")


@dataclass(frozen=True)
class Hand:
    """A person's hand in MLflow and in the object store.

    Attributes:
        tracking_uri: where MLflow answers.
        storage: settings of the object store, as the variables that S3 clients read.
    """

    tracking_uri: str
    storage: dict[str, str]

    @property
    def mlflow(self) -> MlflowClient:
        """MLflow's own client."""
        return MlflowClient(self.tracking_uri)

    def table(self, uri: str, version: int) -> DeltaTable:
        """A Delta table in the object store."""
        return DeltaTable(uri, version=version, storage_options=self.storage)

    def register(self, model: str, run_id: str, *losses: float) -> list[str]:
        """Register a version for each evaluation loss, evaluated on the data of that run."""
        client = self.mlflow
        origin = client.get_run(run_id)
        tags = {
            name: value
            for name, value in origin.data.tags.items()
            if name.startswith(("finetune.dev/", "finetune_")) and name not in _OF_ANOTHER_JOB
        }
        try:
            client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = []
        for loss in losses:
            run = client.create_run(origin.info.experiment_id, tags=tags)
            client.log_metric(run.info.run_id, "eval_loss", loss)
            client.set_terminated(run.info.run_id)
            model_version = client.create_model_version(
                model, f"{run.info.artifact_uri}/model", run.info.run_id
            )
            versions.append(str(model_version.version))
        return versions

    def move_alias(self, model: str, alias: str, version: str | None) -> None:
        """Point an alias at a version, or take it away."""
        if version is None:
            self.mlflow.delete_registered_model_alias(model, alias)
        else:
            self.mlflow.set_registered_model_alias(model, alias, version)

    def aliases(self, model: str) -> dict[str, str]:
        """The aliases of a model, and the version of each."""
        return {name: str(number) for name, number in self.mlflow.get_registered_model(model).aliases.items()}

    def loss_of(self, model_uri: str, table: str, version: int) -> float:
        """The loss of a registered model on the validation split of a table, without the trainer's code."""
        return self.loss_and_answer_of(model_uri, table, version, "")[0]

    def loss_and_answer_of(
        self, model_uri: str, table: str, version: int, question: str
    ) -> tuple[float, str]:
        """The loss as `loss_of` takes it, and what the model answers to a question on this machine."""
        output = self._run(JUDGE, model_uri, table, str(version), question)
        loss, _, answer = output.rpartition("LOSS ")[2].partition("ANSWER ")
        return float(loss), answer.strip()

    def download(self, model_uri: str, folder: Path) -> None:
        """Download the files of a registered model."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*_THROUGH_THE_SERVER)
            # NB: MLflow looks up where a version lies in the server of its environment, whatever the arguments say.
            patch.setenv("MLFLOW_TRACKING_URI", self.tracking_uri)
            patch.setenv("MLFLOW_REGISTRY_URI", self.tracking_uri)
            mlflow.artifacts.download_artifacts(
                model_uri,
                dst_path=str(folder),
                tracking_uri=self.tracking_uri,
                registry_uri=self.tracking_uri,
            )

    def _run(self, script: Path, *arguments: str) -> str:
        """What a script prints that loads a model from MLflow."""
        settings = {
            "PYTHONPATH": str(TESTS),
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            **dict([_THROUGH_THE_SERVER]),
        }
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **self.storage, **settings},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def reaching(installation: Installation) -> Iterator[Hand]:
    """A hand that reaches the cluster while inside."""
    kubectl = installation.place.kubectl
    secret = kubectl.get("secret", "s3-credentials", "--namespace", NAMESPACE)
    assert secret is not None
    storage = {name: b64decode(value).decode() for name, value in secret["data"].items()}
    with (
        forwarded(kubectl, SYSTEM, f"{RELEASE}-mlflow", 5000) as mlflow,
        forwarded(kubectl, NAMESPACE, "object-store", 7070) as store,
    ):
        yield Hand(mlflow, storage | {"AWS_ENDPOINT_URL": store})


@contextmanager
def forwarded(kubectl: Kubectl, namespace: str, service: str, port: int) -> Iterator[str]:
    """The address on this machine at which a Service answers while inside."""
    where = ("--namespace", namespace, "port-forward", f"service/{service}", f":{port}")
    command = [str(kubectl.program), "--kubeconfig", str(kubectl.kubeconfig), *where]
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log) as forwarding,
    ):
        output = Path(log.name)
        try:
            address = wait_for(
                f"{namespace}/{service} is forwarded",
                lambda: re.search(r"Forwarding from (127\.0\.0\.1:\d+)", output.read_text()),
                60,
                instead=output.read_text,
            )
            yield f"http://{address[1]}"
        finally:
            forwarding.terminate()
