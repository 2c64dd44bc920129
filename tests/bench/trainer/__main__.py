"""`python -m bench.trainer`: measure, print the tables, and leave a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bench.console import positive, publish
from bench.trainer import contenders, machine, report, rows
from bench.trainer.contenders import Settings
from bench.trainer.process import RunFailedError
from bench.trainer.report import Result
from bench.trainer.shapes import LLAMA_1B, LLAMA_8B, SHAPES, SMALL, Shape
from bench.trainer.work import Work

_OUTPUT = "build/bench-trainer.json"
# A run may take what is left of the time, within these.
_SHORTEST_RUN_SECONDS, _LONGEST_RUN_SECONDS = 60.0, 600.0


def main(arguments: list[str]) -> int:
    """Measure; 1 where a contender failed in every round, 0 otherwise, also when a goal is missed."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda received, _frame: sys.exit(128 + received))
    os.environ["HF_HUB_OFFLINE"] = "1"
    described = machine.describe()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    shapes = [SHAPES[name] for name in options.model] or (
        [LLAMA_1B, LLAMA_8B] if described["gpus"] else [SMALL]
    )
    ways = [options.processes] if options.processes else _ways(described)
    results = []
    measurements = [(shape, processes) for shape in shapes for processes in ways]
    with tempfile.TemporaryDirectory(prefix="bench-trainer-", dir=options.work) as folder:
        for at, (shape, processes) in enumerate(measurements):
            end = time.monotonic() + options.minutes * 60 / len(measurements)
            result = Result(_changed(shape, options), processes, described["gpu"])
            measure(result, options, Path(folder, str(at)), end)
            results.append(result)
    document, markdown = (
        report.as_json(described, date, results),
        report.as_markdown(described, date, results),
    )
    publish(document, markdown, options.output)
    return int(any(not result.rounds.get(name) for result in results for name in result.failures))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.trainer",
        description="Compare the trainer with a padded script and with TRL, on the same rows in one run.",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="rounds at most (default: %(default)s)")
    parser.add_argument("--steps", type=positive, help="steps to measure in a run (default: the model's)")
    parser.add_argument(
        "--processes",
        type=positive,
        help="ranks (default: one a GPU; without GPUs two, and one with two threads)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=contenders.NAMES, default=list(contenders.NAMES), help="these contenders"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=list(SHAPES),
        default=[],
        help="these models (default: the small one on CPU, the two others on GPUs)",
    )
    parser.add_argument(
        "--sequences", type=positive, help="sequences of a rank in a step (default: the model's)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        type=_change,
        default=[],
        metavar="PATH=VALUE",
        help="values for our recipe, such as training.compile=true",
    )
    parser.add_argument(
        "--minutes", type=float, default=24.0, help="no new run that would end later (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, help="folder to work in (default: TMPDIR)")
    parser.add_argument("--output", type=Path, default=Path(_OUTPUT), help="JSON file (default: %(default)s)")
    return parser.parse_args(arguments)


def measure(result: Result, options: argparse.Namespace, folder: Path, end: float) -> None:
    """Round after round of all contenders, as many as can end in time; each round begins with another.

    Args:
        result: takes the figures.
        options: the command line.
        folder: to work in; removed at the end, since a model may be large.
        end: on the monotonic clock.
    """
    shape = result.shape
    work, result.rows = prepare(shape, result.processes, folder)
    print(f"{shape.name}: rows: {json.dumps(result.rows)}", flush=True)
    names = _that_can_run(options.only, result, machine.describe()["gpus"])
    slowest = dict.fromkeys(names, 0.0)
    for number in range(options.rounds if names else 0):
        if time.monotonic() + sum(slowest.values()) > end:
            print(f"{shape.name}: {number} rounds: there is no time for another", flush=True)
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = time.monotonic()
            settings = Settings(
                checkpoint_steps=shape.checkpoint_steps,
                seconds=min(_LONGEST_RUN_SECONDS, max(_SHORTEST_RUN_SECONDS, end - began)),
                changes=dict(options.set),
            )
            _run(name, work, settings, result, number + 1)
            slowest[name] = max(slowest[name], time.monotonic() - began)
    shutil.rmtree(folder)


def _ways(described: dict[str, Any]) -> list[int]:
    """How many processes share the machine: one a GPU; on CPU two, and one with the threads of both."""
    if described["gpus"]:
        return [described["gpus"]]
    return [2, 1] if described["cores"] > 1 else [1]


def _that_can_run(selected: list[str], result: Result, gpus: int) -> list[str]:
    """The contenders that can run here; of the others the result says why not."""
    runnable = []
    for name in contenders.NAMES:
        if name not in selected:
            continue
        reason = contenders.missing(name, gpus=gpus)
        if reason is None:
            runnable.append(name)
        else:
            result.failures[name] = [reason]
    return runnable


def _run(name: str, work: Work, settings: Settings, result: Result, number: int) -> None:
    """One run of a contender. A failure is reported, and the other contenders still run."""
    try:
        figures = contenders.measure(name, work, settings)
    except RunFailedError as error:
        result.failures.setdefault(name, []).append(str(error))
        print(f"{result.shape.name}: round {number}: {name} failed: {error}", flush=True)
        return
    result.rounds.setdefault(name, {})[number] = figures
    print(
        f"{result.shape.name}: round {number}: {name}: {figures.tokens_per_second:,.0f} useful tok/s, "
        f"{figures.tokens_per_step:,.0f} tokens a step",
        flush=True,
    )


def prepare(shape: Shape, processes: int, folder: Path) -> tuple[Work, dict[str, Any]]:
    """Make rows and model in `folder`; the work on them, and how long the rows are."""
    out = folder / "out"
    out.mkdir(parents=True)
    pieces = rows.pieces()
    tokenizer = rows.train_tokenizer(pieces)
    sequences = shape.sequences * processes
    texts = rows.make(tokenizer, pieces, rows.enough((shape.warmup + shape.steps) * sequences))
    work = Work(
        model=str(folder / "model"),
        rows=str(folder / "rows.jsonl"),
        probe=str(folder / "probe.jsonl"),
        row_tokens=texts.mean,
        out=str(out),
        method=shape.method,
        precision=shape.precision,
        sequences=shape.sequences,
        warmup=shape.warmup,
        steps=shape.steps,
        processes=processes,
    )
    texts.save(Path(work.rows))
    texts.that_fit(work.max_length).save(Path(work.probe))
    rows.save_model(tokenizer, shape, Path(work.model))
    return work, texts.distribution()


def _changed(shape: Shape, options: argparse.Namespace) -> Shape:
    """The shape with what the command line says."""
    return replace(
        shape,
        steps=options.steps or shape.steps,
        sequences=options.sequences or shape.sequences,
        checkpoint_steps=min(shape.checkpoint_steps, options.steps or shape.steps),
    )


def _change(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not (path and equals):
        raise argparse.ArgumentTypeError(f"{text} is no PATH=VALUE")
    return path, yaml.safe_load(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
