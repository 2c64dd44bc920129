"""A training pod without Kubernetes, and what it trains: a tiny Llama on a tiny corpus in a Delta table."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.contract import TerminationMessage
from finetune_trainer.train.runtime import scratch
from support.forks import ForkedPod, kill_pod
from support.ports import free_port

_WORDS = ("red", "blue", "green", "small", "large", "old", "new", "warm", "cold", "quiet")
_THINGS = ("house", "river", "stone", "garden", "letter", "window", "engine", "market")


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


def save_base_model(folder: Path, *, attention_dropout: float = 0.0, seed: int = 0, width: int = 32) -> None:
    """Save a Llama with two layers, random weights and a BPE tokenizer as a user would."""
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
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            attention_dropout=attention_dropout,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_table(folder: Path) -> None:
    """Save the corpus as the preparation leaves it: one Delta table with a split column, at version 0."""
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(folder), pa.Table.from_pylist(examples()))


def preferences() -> list[dict[str, Any]]:
    """The same prompts with the right answer, chosen, and one in which the words are swapped, rejected."""
    pairs = []
    for row in examples():
        answer = row.pop("response")
        _the, thing, _is, word = answer.rstrip(".").split()
        pairs.append({**row, "chosen": answer, "rejected": f"The {word} is {thing}."})
    return pairs


def train_by_hand(folder: Path, *, steps: int) -> None:
    """Train a saved model on the corpus in plain torch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [f"{row['prompt']}{row['response']}<eos>" for row in examples() if row["split"] == "train"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def save_preferences(folder: Path) -> None:
    """Save the preferences as a Delta table, at version 0."""
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(folder), pa.Table.from_pylist(preferences()))


def save_unpaired(folder: Path) -> None:
    """Save an answer of each preference as a Delta table, at version 0: two right ones, two others, and so on."""
    import pyarrow as pa
    from deltalake import write_deltalake

    rows = []
    for number, row in enumerate(preferences()):
        answers = {True: row.pop("chosen"), False: row.pop("rejected")}
        # Splits take every tenth row: both kinds are in each.
        good = number // 2 % 2 == 0
        rows.append({**row, "completion": answers[good], "label": good})
    write_deltalake(str(folder), pa.Table.from_pylist(rows))


def tiny_recipe(base_model: Path, table: Path) -> dict[str, Any]:
    """A recipe that trains the tiny model for a few steps on the tiny corpus, on one rank."""
    return {
        "kind": "Recipe",
        "job": {"name": "tiny", "namespace": "tests", "uid": "0123456789abcdef"},
        "model": {"base": str(base_model)},
        "data": {
            "columns": {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
            "splits": {"type": "Delta", "path": str(table), "version": 0},
        },
        "training": {
            "maxSteps": 6,
            "perDeviceBatchSize": 4,
            "learningRate": 5e-3,
            "scheduler": "Constant",
            "warmupSteps": 0,
            "maxLength": 64,
            "precision": "FP32",
            "logEverySteps": 1,
        },
    }


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
    forked: bool = False
    """Whether its processes are forks of one that has imported torch."""

    def but(self, changes: dict[str, Any]) -> Pod:
        """The same pod with some of the recipe's values changed, by dotted path."""
        recipe = copy.deepcopy(self.recipe)
        for path, value in changes.items():
            *parents, last = path.split(".")
            part = recipe
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = value
        return Pod(self.folder, recipe, dict(self.env), self.forked)

    def in_gang(self, rank: int, port: int) -> Pod:
        """The same pod as one of two on this machine, each with one process and the first one's rendezvous."""
        member = self.but({})
        member.env |= {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(port),
        }
        return member

    def start(self) -> subprocess.Popen[str] | ForkedPod:
        """Start the pod's process; the caller waits for it."""
        self._termination.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "FINETUNE_RECIPE": str(self._write_recipe()),
            "FINETUNE_TERMINATION_PATH": str(self._termination),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
            **self.env,
        }
        if self.forked:
            return ForkedPod(environment, self.folder / "output")
        return subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer.train"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, process: subprocess.Popen[str] | ForkedPod, already_read: str = "") -> Outcome:
        """How a started pod ends."""
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            kill_pod(process.pid)
            raise
        termination = self._termination.read_text() if self._termination.exists() else None
        assert process.returncode is not None
        return Outcome(process.returncode, already_read + output, TerminationMessage.parse(termination))

    def run(self) -> Outcome:
        """Run the pod to its end."""
        return self.wait(self.start())

    def run_here(self, capsys: pytest.CaptureFixture[str]) -> Outcome:
        """Run the pod's only rank in this process: the launcher left out, nothing else."""
        import torch.distributed

        from finetune_trainer.train import worker

        on_sigterm = signal.getsignal(signal.SIGTERM)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, pytest.MonkeyPatch.context() as patch:
            environment = {
                "FINETUNE_RECIPE": str(self._write_recipe()),
                "HF_HUB_OFFLINE": "1",
                scratch.ENV_SCRATCH: folder,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port()),
                **self.env,
            }
            for name, value in environment.items():
                patch.setenv(name, value)
            # On GPUs a rank that has failed leaves its process like this, and its groups as they are.
            patch.setattr(os, "_exit", sys.exit)
            try:
                code = worker.main()
            except SystemExit as exited:
                code = int(exited.code or 0)
                torch.distributed.destroy_process_group()
            finally:
                signal.signal(signal.SIGTERM, on_sigterm)
            outcome = scratch.read_outcome(Path(folder), 0)
        assert outcome is not None
        return Outcome(code, capsys.readouterr().out, outcome.message)

    def _write_recipe(self) -> Path:
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self.recipe))
        return recipe

    @property
    def _termination(self) -> Path:
        return self.folder / "termination.json"
