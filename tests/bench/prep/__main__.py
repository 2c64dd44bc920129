"""`python -m bench.prep`: measure the contenders in turns, print a table, and leave a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.prep import alone, rows, tutorial
from bench.trainer import machine, process

OURS, TUTORIAL = "ours", "tutorial"
GOAL_TUTORIAL, GOAL_TOKENIZER = 8.0, 0.6
JARS = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache/finetune-operator"), "jars")
_LONGEST_RUN_SECONDS = 3600.0
_SAMPLE_SECONDS = 0.5


@dataclass
class Run:
    """One run of a contender: wall time with the start of Spark, and the peak memory of its processes together."""

    seconds: float
    peak_bytes: int
    output_bytes: int


@dataclass
class Result:
    """All runs on a corpus. tokenizer: documents a second of one core."""

    documents: int
    cores: int
    tokenizer: float
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def speed(self, name: str) -> float:
        """The median of a contender's documents a second."""
        return self.documents / statistics.median(run.seconds for run in self.runs[name])

    def times_tutorial(self) -> float:
        """How many times as fast as the tutorial's way: the median of the rounds."""
        pairs = zip(self.runs[OURS], self.runs[TUTORIAL], strict=True)
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def share_of_tokenizer(self) -> float:
        """Our speed as a share of what the tokenizer alone would have on all cores."""
        return self.speed(OURS) / (self.tokenizer * self.cores)


def main(arguments: list[str]) -> int:
    """Measure; the exit code is 0 also when a goal is missed."""
    options = _options(arguments)
    described, date = machine.describe(), datetime.now(UTC).strftime("%Y-%m-%d")
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-prep-", dir=options.work) as folder:
        for number in options.rows:
            results.append(measure(number, options, Path(folder, str(number))))
            shutil.rmtree(Path(folder, str(number)))
    corpora = [_as_json(result) for result in results]
    whole = {"schema": "finetune-bench-prep/1", "date": date, "machine": described, "corpora": corpora}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(
        f"\n{described['cpu']}, {described['cores']} cores, {date}\n\n{as_markdown(results)}\n\nwritten to {options.output}"
    )
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.prep", description="Compare the preparation with the tutorial's way."
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[500_000], help="rows of each corpus (default: 500000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=[OURS, TUTORIAL], default=[OURS, TUTORIAL], help="these contenders"
    )
    parser.add_argument("--jars", type=Path, default=JARS, help="folder that trainer_image/jars.sh filled")
    parser.add_argument(
        "--set", type=json.loads, default={}, metavar="JSON", help="more of data.prepare of ours"
    )
    parser.add_argument("--work", type=Path, help="folder to work in (default: TMPDIR)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench-prep.json"), help="JSON file (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def measure(number: int, options: argparse.Namespace, folder: Path) -> Result:
    """Round after round of all contenders; each round begins with another."""
    rows.make(number, folder)
    print(f"{number:,} rows in {folder}", flush=True)
    said = _python(alone.__file__, [str(folder / "corpus"), str(folder / "tokenizer")], folder)
    counted = json.loads(said[-1].text)
    result = Result(number, machine.describe()["cores"], counted["documents"] / counted["seconds"])
    print(f"the tokenizer alone: {result.tokenizer:,.0f} documents/s a core", flush=True)
    for at in range(options.rounds):
        first = at % len(options.only)
        for name in options.only[first:] + options.only[:first]:
            run = _run(name, options, folder)
            result.runs.setdefault(name, []).append(run)
            print(
                f"round {at + 1}: {name}: {run.seconds:.1f} s, {run.peak_bytes / 2**30:.2f} GiB", flush=True
            )
    return result


def _run(name: str, options: argparse.Namespace, folder: Path) -> Run:
    output = folder / "output"
    with _memory() as peak:
        began = time.monotonic()
        if name == OURS:
            recipe = folder / "recipe.yaml"
            recipe.write_text(yaml.safe_dump(_recipe(folder, output, options.set)), encoding="utf-8")
            command = [
                "-m",
                "finetune_trainer.prep",
                "--recipe",
                str(recipe),
                "--report",
                str(folder / "report"),
            ]
            _python(command[0], command[1:], folder, FINETUNE_JARS=str(options.jars.absolute()))
        else:
            places = [folder / "corpus", folder / "tokenizer", output, options.jars.absolute()]
            _python(
                tutorial.__file__, [str(place) for place in places], folder, PYSPARK_PYTHON=sys.executable
            )
        seconds = time.monotonic() - began
    written = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    shutil.rmtree(output)
    return Run(seconds, peak[0], written)


def _recipe(folder: Path, output: Path, more: dict[str, Any]) -> dict[str, Any]:
    """The same steps as the tutorial's."""
    return {
        "kind": "Recipe",
        "job": {"name": "bench", "namespace": "bench", "uid": "bench"},
        "model": {"base": str(folder / "tokenizer")},
        "data": {
            "source": {"type": "Parquet", "path": str(folder / "corpus")},
            "columns": {"type": "PromptResponse", "prompt": "instruction", "response": "answer"},
            "prepare": {
                "minQuality": 0.5,
                "minChars": 40,
                "maxChars": 4000,
                "promptTemplate": "Question: {instruction}\nAnswer: {answer}",
                "maxTokens": 1024,
                "output": str(output),
                **more,
            },
        },
    }


def _python(script: str, arguments: list[str], folder: Path, **environment: str) -> list[process.Line]:
    command = [sys.executable, script, *arguments]
    return process.run(command, os.environ | environment, folder=folder, seconds=_LONGEST_RUN_SECONDS)


@contextmanager
def _memory() -> Iterator[list[int]]:
    """The peak of the memory of all processes that this one started, in bytes; shared pages count once."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            held = 0
            for child in psutil.Process().children(recursive=True):
                try:
                    held += child.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            peak[0] = max(peak[0], held)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _as_json(result: Result) -> dict[str, Any]:
    whole = len(result.runs) == len((OURS, TUTORIAL))
    return asdict(result) | {
        "documentsPerSecond": {name: result.speed(name) for name in result.runs},
        "timesTutorial": result.times_tutorial() if whole else None,
        "shareOfTokenizer": result.share_of_tokenizer() if OURS in result.runs else None,
    }


def as_markdown(results: list[Result]) -> str:
    """A row for each contender and corpus, and the goals."""
    lines = ["| Rows | | Documents/s | Peak GiB | Written MiB |", "|---:|---|---:|---:|---:|"]
    for result in results:
        lines.append(f"| {result.documents:,} | tokenizer, one core | {result.tokenizer:,.0f} | | |")
        for name, runs in result.runs.items():
            memory = statistics.median(run.peak_bytes for run in runs) / 2**30
            written = runs[0].output_bytes / 2**20
            lines.append(f"| | {name} | {result.speed(name):,.0f} | {memory:.2f} | {written:,.0f} |")
        if OURS in result.runs and TUTORIAL in result.runs:
            lines.append(
                f"| | ours / tutorial (goal {GOAL_TUTORIAL:g}x) | {result.times_tutorial():.1f}x | | |"
            )
        if OURS in result.runs:
            lines.append(
                f"| | ours / tokenizer on all cores (goal {GOAL_TOKENIZER:g}) | {result.share_of_tokenizer():.2f} | | |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
