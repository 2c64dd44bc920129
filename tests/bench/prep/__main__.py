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

from bench.console import publish
from bench.prep import alone, executors, rows, tutorial
from bench.trainer import machine, process

OURS, EXECUTORS, TUTORIAL, TROVE = "ours", "ours on executors", "tutorial", "datatrove"
CONTENDERS = {"ours": OURS, "executors": EXECUTORS, "tutorial": TUTORIAL, "datatrove": TROVE}
GOAL_TUTORIAL, GOAL_TOKENIZER, GOAL_EXECUTORS = 8.0, 0.6, 1.15
JARS = Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache/finetune-operator"), "jars")
# NB: not imported, since datatrove is not among the packages of this environment.
_TROVE = Path(__file__).with_name("trove.py")
_LONGEST_RUN_SECONDS = 3600.0
_SAMPLE_SECONDS = 0.5
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


@dataclass
class Run:
    """One run of a contender: wall time with the start of Spark, and the peak memory of its processes together.

    executors_peak_bytes: of executors that are processes of their own, with their Python workers.
    """

    seconds: float
    peak_bytes: int
    output_bytes: int
    executors_peak_bytes: int = 0


@dataclass
class Result:
    """All runs on a corpus. tokenizer: documents a second of one core. tokens: of a document, in the mean."""

    documents: int
    cores: int
    tokenizer: float
    tokens: float
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def speed(self, name: str) -> float:
        """The median of a contender's documents a second."""
        return self.documents / statistics.median(run.seconds for run in self.runs[name])

    def times_ours(self, name: str) -> float | None:
        """The time of a contender as a multiple of ours: the median of the rounds; None where one of them did not run."""
        if not {OURS, name} <= self.runs.keys():
            return None
        pairs = zip(self.runs[OURS], self.runs[name], strict=True)
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def share_of_tokenizer(self) -> float | None:
        """Our speed as a share of what the tokenizer alone would have on all cores; None where ours did not run."""
        return self.speed(OURS) / (self.tokenizer * self.cores) if OURS in self.runs else None


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
    document = {"schema": "finetune-bench-prep/1", "date": date, "machine": described, "corpora": corpora}
    title = f"{described['cpu']}, {described['cores']} cores, {date}"
    publish(document, f"{title}\n\n{as_markdown(results)}", options.output)
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
        "--only", nargs="+", choices=CONTENDERS, default=[*CONTENDERS], help="these contenders"
    )
    parser.add_argument(
        "--datatrove",
        type=Path,
        default=Path("build/datatrove/bin/python"),
        help="Python of an environment with datatrove.txt (default: %(default)s)",
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
    output = _python([alone.__file__, str(folder / "corpus"), str(folder / "tokenizer")], folder)
    counted = json.loads(output[-1].text)
    result = Result(
        number,
        machine.describe()["cores"],
        counted["documents"] / counted["seconds"],
        counted["tokens"] / counted["documents"],
    )
    print(f"the tokenizer alone: {result.tokenizer:,.0f} documents/s a core", flush=True)
    for at in range(options.rounds):
        first = at % len(options.only)
        for name in (CONTENDERS[short] for short in options.only[first:] + options.only[:first]):
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
        if name == TROVE:
            places = [_TROVE, folder / "corpus", folder / "tokenizer", output, machine.describe()["cores"]]
            _python([*map(str, places)], folder, python=options.datatrove.absolute())
        elif name == TUTORIAL:
            places = [folder / "corpus", folder / "tokenizer", output, options.jars.absolute()]
            arguments = [tutorial.__file__, *map(str, places)]
            _python(arguments, folder, PYSPARK_PYTHON=sys.executable)
        else:
            recipe, report = folder / "recipe.yaml", folder / "report"
            recipe.write_text(yaml.safe_dump(_recipe(folder, output, options.set)), encoding="utf-8")
            program = ["-m", "finetune_trainer.prep"] if name == OURS else [executors.__file__]
            arguments = [*program, "--recipe", str(recipe), "--report", str(report)]
            _python(arguments, folder, FINETUNE_JARS=str(options.jars.absolute()))
        seconds = time.monotonic() - began
    written = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    shutil.rmtree(output)
    return Run(seconds, peak[0], written, peak[1])


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


def _python(
    arguments: list[str], folder: Path, python: str | Path = sys.executable, **environment: str
) -> list[process.Line]:
    command = [str(python), *arguments]
    return process.run(command, os.environ | environment, folder=folder, seconds=_LONGEST_RUN_SECONDS)


@contextmanager
def _memory() -> Iterator[list[int]]:
    """The peaks of the memory of all processes that this one started, and of executors among them, in bytes.

    Shared pages count once.
    """
    peak, ended = [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            sample_bytes = [0, 0]
            executors: set[int] = set()
            # NB: a parent comes before its children.
            for child in psutil.Process().children(recursive=True):
                try:
                    if child.ppid() in executors or _EXECUTOR in child.cmdline():
                        executors.add(child.pid)
                    used = child.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                sample_bytes[0] += used
                sample_bytes[1] += used if child.pid in executors else 0
            peak[:] = map(max, peak, sample_bytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _as_json(result: Result) -> dict[str, Any]:
    return asdict(result) | {
        "documentsPerSecond": {name: result.speed(name) for name in result.runs},
        "timesTutorial": result.times_ours(TUTORIAL),
        "timesDatatrove": result.times_ours(TROVE),
        "executorsTimesOnePod": result.times_ours(EXECUTORS),
        "shareOfTokenizer": result.share_of_tokenizer(),
    }


def as_markdown(results: list[Result]) -> str:
    """A row for each contender and corpus, and the goals."""
    lines = [
        "| Rows | | Documents/s | Tokens/s a core | Peak GiB | Of executors | Written MiB |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        tokens = result.tokenizer * result.tokens
        lines.append(
            f"| {result.documents:,} | tokenizer, one core | {result.tokenizer:,.0f} | {tokens:,.0f} | | | |"
        )
        for name, runs in result.runs.items():
            memory = statistics.median(run.peak_bytes for run in runs) / 2**30
            executors = statistics.median(run.executors_peak_bytes for run in runs) / 2**30
            written, tokens = runs[0].output_bytes / 2**20, result.speed(name) * result.tokens / result.cores
            lines.append(
                f"| | {name} | {result.speed(name):,.0f} | {tokens:,.0f} | {memory:.2f} | {executors:.2f} | {written:,.0f} |"
            )
        goals = (
            ("tutorial / ours", GOAL_TUTORIAL, "at least", result.times_ours(TUTORIAL)),
            ("datatrove / ours", 1.0, "at least", result.times_ours(TROVE)),
            ("ours on executors / ours", GOAL_EXECUTORS, "at most", result.times_ours(EXECUTORS)),
            ("speed of the tokenizer on all cores", GOAL_TOKENIZER, "at least", result.share_of_tokenizer()),
        )
        lines += [
            f"| | {what} (goal {bound} {goal:g}) | {reached:.2f} | | | | |"
            for what, goal, bound, reached in goals
            if reached is not None
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
