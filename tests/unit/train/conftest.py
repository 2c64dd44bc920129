"""A tiny Llama, a tiny corpus in a Delta table, MLflow on SQLite, and the real launcher."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.contract import TerminationMessage

_WORDS = ("red", "blue", "green", "small", "large", "old", "new", "warm", "cold", "quiet")
_THINGS = ("house", "river", "stone", "garden", "letter", "window", "engine", "market")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def examples() -> list[dict[str, Any]]:
    """Prompts and answers that a tiny model learns in a few steps; every tenth is for validation."""
    rows = [
        {"prompt": f"What is the {word} {thing}? ", "response": f"The {thing} is {word}."}
        for word in _WORDS
        for thing in _THINGS
    ]
    return [
        {"id": str(at), "tokens": 12, "split": "validation" if at % 10 == 0 else "train", **row}
        for at, row in enumerate(rows)
    ]


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers and a BPE tokenizer, saved as a user would."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [row["prompt"] + row["response"] for row in examples()]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<eos>", "<pad>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as the preparation leaves it: one Delta table with a split column, at version 0."""
    import pyarrow as pa
    from deltalake import write_deltalake

    folder = tmp_path_factory.mktemp("corpus") / "splits"
    write_deltalake(str(folder), pa.Table.from_pylist(examples()))
    return folder


@dataclass
class Outcome:
    """How a pod ended."""

    code: int
    output: str
    message: TerminationMessage | None

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step, as the progress lines tell it."""
        lines = [line.split() for line in self.output.splitlines() if line.startswith("step ")]
        return {int(line[1].split("/")[0]): float(line[line.index("loss") + 1]) for line in lines}


@dataclass
class Pod:
    """A training pod without Kubernetes: a recipe, an environment, and `finetune-train`."""

    folder: Path
    recipe: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)

    def but(self, changes: dict[str, Any]) -> Pod:
        """The same pod with some of the recipe's values changed, by dotted path."""
        recipe = copy.deepcopy(self.recipe)
        for path, value in changes.items():
            *parents, last = path.split(".")
            part = recipe
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = value
        return Pod(self.folder, recipe, dict(self.env))

    def start(self) -> subprocess.Popen[str]:
        """Start the pod's process; the caller waits for it."""
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self.recipe))
        self._termination.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "HYPERPARAMETERS_PATH": str(recipe),
            "FINETUNE_TERMINATION_PATH": str(self._termination),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
            **self.env,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer.train"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, process: subprocess.Popen[str], already_read: str = "") -> Outcome:
        """How a started pod ends."""
        output, _ = process.communicate(timeout=120)
        told = self._termination.read_text() if self._termination.exists() else None
        return Outcome(process.returncode, already_read + output, TerminationMessage.parse(told))

    def run(self) -> Outcome:
        """Run the pod to its end."""
        return self.wait(self.start())

    def run_here(self, capsys: pytest.CaptureFixture[str]) -> Outcome:
        """Run the pod's only rank in this process: the launcher left out, nothing else."""
        from finetune_trainer.train import launch, worker

        recipe = self.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self.recipe))
        on_sigterm = signal.getsignal(signal.SIGTERM)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch, pytest.MonkeyPatch.context() as patch:
            environment = {
                "HYPERPARAMETERS_PATH": str(recipe),
                "HF_HUB_OFFLINE": "1",
                launch.ENV_SCRATCH: scratch,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port()),
                **self.env,
            }
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = worker.main()
            finally:
                signal.signal(signal.SIGTERM, on_sigterm)
            told = launch.said(Path(scratch), 0)
        assert told is not None
        return Outcome(code, capsys.readouterr().out, told.message)

    @property
    def _termination(self) -> Path:
        return self.folder / "termination.json"


@pytest.fixture(scope="session")
def recipe(base_model: Path, table: Path) -> dict[str, Any]:
    """A recipe that trains the tiny model for a few steps on the tiny corpus, on one rank."""
    return {
        "kind": "Recipe",
        "job": {"name": "tiny", "namespace": "tests", "uid": "0123456789abcdef"},
        "model": {"base": str(base_model)},
        "data": {
            "columns": {"prompt": "prompt", "response": "response"},
            "splits": {"format": "Delta", "path": str(table), "version": 0},
        },
        "training": {
            "maxSteps": 6,
            "batchSize": 4,
            "learningRate": 5e-3,
            "scheduler": "Constant",
            "warmupSteps": 0,
            "maxLength": 64,
            "precision": "FP32",
            "logSteps": 1,
        },
    }


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
    from mlflow import MlflowClient

    database = folder / "mlflow.db"
    database.write_bytes(template.read_bytes())
    uri = f"sqlite:///{database}"
    client = MlflowClient(uri, uri)
    experiment = client.create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    return Mlflow(uri, client.create_run(experiment).info.run_id)


@pytest.fixture
def mlflow(tmp_path: Path, mlflow_template: Path) -> Mlflow:
    """MLflow with one run."""
    return new_mlflow(tmp_path, mlflow_template)


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
        }
    )
    pod.env |= mlflow.env
    return Trained(pod, mlflow, pod.run())
