"""Fixtures of the trainer's tests: a tiny Llama, a tiny corpus in a Delta table, MLflow on SQLite, whole runs."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.pod import library_variables
from support.cache import cache
from support.pods import (
    Outcome,
    Pod,
    save_base_model,
    save_preferences,
    save_table,
    save_unpaired,
    tiny_recipe,
    train_by_hand,
)
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.contract import PodError
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World
    from support.cells import Models


# The fixtures, which a conftest takes all together.
__all__ = [
    "base_model",
    "mlflow",
    "mlflow_imported",
    "mlflow_of_test",
    "mlflow_template",
    "models",
    "one_layer",
    "pod",
    "preferences",
    "recipe",
    "table",
    "teacher",
    "trained",
    "unpaired",
    "world",
]

# NB: torch reads these when it is imported. Two workers of pytest and their ranks share few cores: with a thread for each core, a
# small product waits for threads that do not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels that the compiler made are kept for the next run, and it starts no processes to make them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache() / "inductor"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tests call parts of a pod's process in this one.
library_variables.set_defaults()


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
def unpaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as unpaired preferences."""
    folder = tmp_path_factory.mktemp("unpaired") / "splits"
    save_unpaired(folder)
    return folder


@pytest.fixture(scope="session")
def models(base_model: Path, preferences: Path, unpaired: Path, teacher: Path) -> Models:
    """What the cells of methods and objectives train from."""
    from support.cells import Models

    return Models(base_model, preferences, unpaired, teacher)


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
    return new_run(f"sqlite:///{database}", folder)


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
def mlflow_of_test(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    """MLflow with one run, for the pod and for this process."""
    server = new_mlflow(tmp_path, mlflow_template)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    return server


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A gang of one rank: this process."""
    from finetune_trainer.train.runtime.distributed import join_ranks

    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with join_ranks(timeout_seconds=60) as world:
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
    pod = Pod(folder, recipe, forked=True).but(
        {
            "distributed.processesPerNode": 2,
            "training.perDeviceBatchSize": 2,
            "training.maxSteps": 60,
            "checkpoint": {"uri": str(folder / "checkpoints"), "everySteps": 20},
            "register": {"model": "tiny", "tags": {"team": "support"}},
            "tracking.systemMetrics": True,
        }
    )
    pod.env |= mlflow.env
    return Trained(pod, mlflow, pod.run())


def history(mlflow: Mlflow, name: str) -> dict[int, float]:
    """The values of a metric by step."""
    measurements = mlflow.client().get_metric_history(mlflow.run_id, name)
    return {metric.step: metric.value for metric in measurements}


def error_of(outcome: Outcome) -> PodError:
    """The error with which a run ended."""
    assert outcome.message is not None, outcome.output
    assert outcome.message.error is not None, outcome.output
    return outcome.message.error


def split_of(pod: Pod, name: str) -> Split:
    """The tokens of one of the pod's splits."""
    from finetune_crds.recipe import Recipe
    from finetune_trainer.examples.tokenizer import load_tokenizer
    from finetune_trainer.train.data import dataset, encode

    recipe = Recipe.model_validate(pod.recipe)
    encoder = encode.Encoder.of(recipe, load_tokenizer(recipe.model, Path(recipe.model.base)))
    assert recipe.data.splits is not None
    with tempfile.TemporaryDirectory() as folder:
        assert dataset.tokenize(recipe.data.splits, name, encoder, Path(folder))
        return dataset.Split.load(Path(folder))


def validation_loss(model: Any, pod: Pod) -> float:
    """The mean loss over the validation split, one example at a time, without any sharding or packing."""
    import torch

    from finetune_trainer.train.data import pack
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.objectives.sft import Sft

    split = split_of(pod, "validation")
    batches = [pack.collate(split, [[example]], pad_id=0) for example in range(len(split))]
    with torch.no_grad():
        total = sum(Network(model.eval(), Sft())(batch)[0].item() for batch in batches)
    return float(total / sum(batch.targets_count for batch in batches))


def eval_loss_of(outcome: Outcome) -> float:
    """The final evaluation loss of a run."""
    assert outcome.message is not None, outcome.output
    assert outcome.message.train is not None, outcome.output
    assert outcome.message.train.eval_loss is not None
    return outcome.message.train.eval_loss


@pytest.fixture(scope="session")
def one_layer(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with its first layer alone, and with biases."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune_trainer.examples.tokenizer import load_tokenizer
    from support import networks

    folder = tmp_path_factory.mktemp("one-layer")
    config = LlamaConfig.from_pretrained(base_model)
    config.num_hidden_layers, config.attention_bias = 1, True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(networks.recipe(base_model).model, base_model).save_pretrained(folder)
    return folder
