"""A tiny Llama, a tiny corpus in a Delta table, MLflow on SQLite, and the real launcher."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.pods import (
    Outcome,
    Pod,
    save_base_model,
    save_preferences,
    save_table,
    tiny_recipe,
    train_by_hand,
)
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers and a BPE tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    save_base_model(folder)
    return folder


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as the preparation leaves it."""
    folder = tmp_path_factory.mktemp("corpus") / "splits"
    save_table(folder)
    return folder


@pytest.fixture(scope="session")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as preferences."""
    folder = tmp_path_factory.mktemp("preferences") / "splits"
    save_preferences(folder)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model of the same vocabulary, which knows the corpus."""
    folder = tmp_path_factory.mktemp("teacher")
    save_base_model(folder, seed=1, width=48)
    train_by_hand(folder, steps=30)
    return folder


@pytest.fixture(scope="session")
def recipe(base_model: Path, table: Path) -> dict[str, Any]:
    """The recipe that tests change."""
    return tiny_recipe(base_model, table)


@pytest.fixture
def pod(tmp_path: Path, recipe: dict[str, Any]) -> Pod:
    """A pod with that recipe and without MLflow."""
    return Pod(tmp_path, recipe)


@dataclass
class Mlflow:
    """MLflow on SQLite, with a run as the operator makes it."""

    uri: str
    run_id: str

    @property
    def env(self) -> dict[str, str]:
        """What the operator sets in the pods."""
        return {"MLFLOW_TRACKING_URI": self.uri, "MLFLOW_RUN_ID": self.run_id, "FINETUNE_ATTEMPT": "1"}

    def client(self) -> Any:
        """A client of it."""
        from mlflow import MlflowClient

        return MlflowClient(self.uri, self.uri)


@pytest.fixture(scope="session")
def mlflow_imported() -> None:
    """MLflow's modules warn about each other while they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow.pyfunc
        import mlflow.store.tracking.sqlalchemy_store
        import mlflow.transformers  # noqa: F401


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory, mlflow_imported: None) -> Path:
    """An empty MLflow database, made once: creating its tables takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def new_mlflow(folder: Path, template: Path) -> Mlflow:
    """MLflow with one run, all of it in `folder`."""
    database = folder / "mlflow.db"
    database.write_bytes(template.read_bytes())
    uri = f"sqlite:///{database}"
    return new_run(uri, folder)


def new_run(uri: str, folder: Path) -> Mlflow:
    """A run of an experiment of its own, which keeps its artifacts in `folder`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri, uri)
    experiment = client.create_experiment(folder.name, artifact_location=(folder / "artifacts").as_uri())
    return Mlflow(uri, client.create_run(experiment).info.run_id)


@pytest.fixture
def mlflow(tmp_path: Path, mlflow_template: Path) -> Mlflow:
    """MLflow with one run."""
    return new_mlflow(tmp_path, mlflow_template)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A gang of one rank: this process."""
    from finetune_trainer.train.runtime.distributed import joined

    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with joined(timeout_seconds=60) as world:
        yield world


@dataclass
class Trained:
    """A pod that has trained to the end."""

    pod: Pod
    mlflow: Mlflow
    outcome: Outcome


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, recipe: dict[str, Any], mlflow_template: Path
) -> Trained:
    """One whole run on two ranks, registered, which several tests look at."""
    folder = tmp_path_factory.mktemp("trained")
    mlflow = new_mlflow(folder, mlflow_template)
    pod = Pod(folder, recipe).but(
        {
            "distributed.processesPerNode": 2,
            "training.batchSize": 2,
            "training.maxSteps": 60,
            "checkpoint": {"uri": str(folder / "checkpoints"), "everySteps": 20},
            "register": {"model": "tiny", "tags": {"team": "support"}},
            "tracking.systemMetrics": True,
        }
    )
    pod.env |= mlflow.env
    return Trained(pod, mlflow, pod.run())
