"""The contenders: how each is run, and how its figures are read."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from bench.trainer import process
from bench.trainer.process import Line
from bench.trainer.work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED, Work

OURS, CHECKPOINT, PADDED, LONGEST = "ours", "ours-checkpoint", "padded", "padded-to-longest"
TRL, ISOLATED = "trl", "trl-isolated"
NAMES = (OURS, CHECKPOINT, PADDED, LONGEST, TRL, ISOLATED)
_SCRIPTS: dict[str, tuple[str, ...]] = {
    PADDED: ("bench.trainer.padded",),
    LONGEST: ("bench.trainer.padded", "longest"),
    TRL: ("bench.trainer.trl_packed",),
    ISOLATED: ("bench.trainer.trl_packed", "isolated"),
}
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
_STEP = re.compile(r"^step (?P<step>[\d,]+)/[\d,]+\b.*? grad (?P<gradient>\S+) ")
_CORPUS = re.compile(r"^[\d,]+ examples with (?P<tokens>[\d,]+) tokens in (?P<sequences>[\d,]+) sequences")
_BEFORE = re.compile(r"^evaluation before training: loss (?P<loss>\S+)")


@dataclass(frozen=True)
class Figures:
    """One run of a contender, its warm-up left out.

    loss: of the probe before the training, the mean of its tokens.
    gradient: norm of the gradients of the first step.
    tokens_per_step: tokens of all ranks that are no padding, the mean of the steps.
    useful: share of the slots of a step that are no padding.
    step_seconds: of each step, by the wall.
    in_flight: of each step, whether a checkpoint was written meanwhile.
    host_bytes: peak resident memory, summed over the ranks.
    device_bytes: peak of what torch allocated on the GPUs, summed over them; None on CPU.
    """

    description: str
    loss: float
    gradient: float
    tokens_per_step: float
    useful: float
    step_seconds: list[float]
    in_flight: list[bool]
    host_bytes: int
    device_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        """Useful tokens of all ranks in a second of the measured steps."""
        return self.tokens_per_step * len(self.step_seconds) / sum(self.step_seconds)

    @property
    def flying(self) -> list[float]:
        """Seconds of the steps during which a checkpoint was written."""
        return [second for second, flight in zip(self.step_seconds, self.in_flight, strict=True) if flight]

    @property
    def resting(self) -> list[float]:
        """Seconds of the other steps."""
        return [
            second for second, flight in zip(self.step_seconds, self.in_flight, strict=True) if not flight
        ]


@dataclass(frozen=True)
class Settings:
    """What the command line says about the runs.

    changes: values for our recipe, by dotted path.
    """

    checkpoint_steps: int
    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)


def missing(name: str, *, gpus: int) -> str | None:
    """Why a contender cannot run here, or would not show what it can do; None: it can."""
    if name in (TRL, ISOLATED) and importlib.util.find_spec("trl") is None:
        return "trl is not installed"
    if name == TRL and gpus and importlib.util.find_spec("flash_attn") is None:
        return "not comparable: flash-attn is not installed"
    return None


def measure(name: str, work: Work, settings: Settings) -> Figures:
    """Run a contender once in the empty folder `work.out`, which is emptied again.

    Raises:
        RunFailedError: it failed or took too long.
    """
    out = Path(work.out)
    try:
        if name in (OURS, CHECKPOINT):
            return _ours(work, settings, checkpoint=name == CHECKPOINT)
        return _script(name, work, settings)
    finally:
        shutil.rmtree(out)
        out.mkdir()


def _ours(work: Work, settings: Settings, *, checkpoint: bool) -> Figures:
    """The command of the pods, measured by its own progress lines and when they come."""
    out = Path(work.out)
    every = settings.checkpoint_steps if checkpoint else None
    written = recipe(work, settings.changes, checkpoint_steps=every)
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    environment = _environment(work) | {
        "FINETUNE_RECIPE": str(path),
        "FINETUNE_TERMINATION_PATH": str(out / "termination.json"),
    }
    folder = out / "checkpoints"
    states: list[frozenset] = []

    def look(line: Line) -> None:
        if _STEP.match(line.text):
            states.append(_state(folder))

    command = [sys.executable, "-m", "finetune_trainer.train"]
    lines = process.run(command, environment, folder=out, seconds=settings.seconds, on_line=look)
    seconds = read_progress(lines)
    if len(seconds) != work.all_steps - 1:
        raise process.RunFailedError(
            f"finetune_trainer.train reported {len(seconds) + 1} steps, and {work.all_steps} were asked for"
        )
    changed = [before != after for before, after in pairwise(states)]
    flights = in_flight(changed, every=every) if every else [False] * len(seconds)
    # The first line ends the first step, so that there is one step more of warm-up than seconds of it.
    begin = work.warmup - 1
    loss, gradient = read_check(lines)
    tokens = tokens_of_sequence(lines) * work.processes * work.sequences
    return Figures(
        description=f"FSDP over {work.processes}, {_packing(written)}"
        + (f", a checkpoint every {every} steps" if every else ""),
        loss=loss,
        gradient=gradient,
        tokens_per_step=tokens,
        useful=tokens / _capacity(work),
        step_seconds=seconds[begin:],
        in_flight=flights[begin:],
        **_memory(out),
    )


def recipe(work: Work, changes: dict[str, Any], *, checkpoint_steps: int | None) -> dict[str, Any]:
    """Our recipe for the work: packed, a progress line each step, and the changes of the caller."""
    body: dict[str, Any] = {
        "kind": "Recipe",
        "job": {"name": "bench", "namespace": "bench", "uid": "0123456789abcdef"},
        "model": {"base": work.model},
        "data": {
            "columns": {"type": "Text", "text": "text"},
            "splits": {"type": "JSONLines", "train": work.rows, "validation": work.probe},
        },
        "method": {"type": work.method},
        "training": {
            "maxSteps": work.all_steps,
            "perDeviceBatchSize": work.sequences,
            "learningRate": LEARNING_RATE,
            "scheduler": "Constant",
            "warmupSteps": 0,
            "maxLength": work.max_length,
            "packing": True,
            "precision": work.precision,
            "seed": SEED,
            "logEverySteps": 1,
        },
        "distributed": {"processesPerNode": work.processes},
    }
    if work.method == "LoRA":
        body["method"]["lora"] = {"rank": LORA_RANK, "alpha": LORA_ALPHA}
    if checkpoint_steps is not None:
        folder = str(Path(work.out) / "checkpoints")
        body["checkpoint"] = {"uri": folder, "everySteps": checkpoint_steps, "keep": 1}
    for path, value in changes.items():
        *parents, last = path.split(".")
        part = body
        for parent in parents:
            part = part.setdefault(parent, {})
        part[last] = copy.deepcopy(value)
    return body


def read_progress(lines: Sequence[Line]) -> list[float]:
    """Seconds of each step but the first, by the wall, from our progress lines."""
    step_times = [line.when for line in lines if _STEP.match(line.text)]
    return [after - before for before, after in pairwise(step_times)]


def tokens_of_sequence(lines: Sequence[Line]) -> float:
    """Tokens of a packed sequence, padding left out, the mean of all: from the line about the corpus."""
    corpus_line = next((match for line in lines if (match := _CORPUS.match(line.text))), None)
    if corpus_line is None:
        raise process.RunFailedError("finetune_trainer.train has not said how many tokens its sequences have")
    tokens, sequences = (int(corpus_line[name].replace(",", "")) for name in ("tokens", "sequences"))
    return tokens / sequences


def read_check(lines: Sequence[Line]) -> tuple[float, float]:
    """From our lines: the loss before the training, and the norm of the first step's gradients; NaN where they are missing."""
    losses = [float(match["loss"]) for line in lines if (match := _BEFORE.match(line.text))]
    gradients = [float(match["gradient"]) for line in lines if (match := _STEP.match(line.text))]
    return next(iter(losses), math.nan), next(iter(gradients), math.nan)


def in_flight(changed: Sequence[bool], *, every: int) -> list[bool]:
    """In which of the steps from the second on a checkpoint was written.

    It begins before the step that follows each `every`th, and goes on for as long as its folder changes.

    Args:
        changed: whether the folder of the checkpoints changed during the second step, the third, and so on.
        every: steps between checkpoints.
    """
    writing: list[bool] = []
    for at, change in enumerate(changed):
        steps_before = at + 1
        writing.append(steps_before % every == 0 or (change and bool(writing) and writing[-1]))
    return writing


def _script(name: str, work: Work, settings: Settings) -> Figures:
    """One of the others, under torchrun, measured inside its ranks."""
    out = Path(work.out)
    module, *arguments = _SCRIPTS[name]
    environment = _environment(work) | work.save(out / "work.json")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.processes}"]
    command = [sys.executable, *torchrun, "-m", module, *arguments]
    process.run(command, environment, folder=out, seconds=settings.seconds)
    ranks = [json.loads((out / f"steps-{rank}.json").read_text("utf-8")) for rank in range(work.processes)]
    steps = read_steps([rank["steps"] for rank in ranks])[work.warmup :]
    if len(steps) != work.steps:
        raise process.RunFailedError(f"{module} measured {len(steps)} steps, and {work.steps} were asked for")
    return Figures(
        description=ranks[0]["description"],
        loss=ranks[0]["loss"],
        gradient=ranks[0]["gradient"],
        tokens_per_step=statistics.fmean(tokens for tokens, _, _ in steps),
        useful=sum(tokens for tokens, _, _ in steps) / sum(slots for _, slots, _ in steps),
        step_seconds=[seconds for _, _, seconds in steps],
        in_flight=[False] * len(steps),
        **_memory(out),
    )


def read_steps(ranks: Sequence[Sequence[tuple[int, int, float]]]) -> list[tuple[int, int, float]]:
    """Tokens, slots and seconds of each step out of every rank's: the tokens and slots of all, the seconds of the slowest."""
    return [
        (
            sum(tokens for tokens, _, _ in step),
            sum(slots for _, slots, _ in step),
            max(seconds for _, _, seconds in step),
        )
        for step in zip(*ranks, strict=True)
    ]


def _memory(out: Path) -> dict[str, Any]:
    return read_memory([json.loads(file.read_text("utf-8")) for file in out.glob("memory-*.json")])


def read_memory(measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums over the ranks; of the processes of a rank, its helpers among them, the largest counts."""

    def summed(kind: str) -> int:
        largest: dict[int, int] = {}
        for each in measurements:
            largest[each["rank"]] = max(largest.get(each["rank"], 0), each[kind] or 0)
        return sum(largest.values())

    return {"host_bytes": summed("host"), "device_bytes": summed("device") or None}


def _state(folder: Path) -> frozenset:
    """The files in a folder with their sizes and times."""
    files = set()
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        files.add((str(path), stat.st_size, stat.st_mtime_ns))
    return frozenset(files)


def _capacity(work: Work) -> int:
    return work.processes * work.sequences * work.max_length


def _packing(body: dict[str, Any]) -> str:
    return "packed" if body["training"]["packing"] else "not packed"


def _environment(work: Work) -> dict[str, str]:
    """Everybody's environment: no network, no tracking, the same threads, and sources wherever it runs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "PET_", "FINETUNE_", "HYPERPARAMETERS_"))
        and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    folders = [_HERE / "hook", *(_ROOT / part for part in ("tests", "crds", "trainer_image"))]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
        "PYTHONUNBUFFERED": "1",
        "BENCH_MEMORY": work.out,
        "TMPDIR": work.out,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": f"{work.out}/huggingface",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // work.processes)),
    }
