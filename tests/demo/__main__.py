"""`python -m demo up|down`: from a corpus to a champion and back, on a cluster of this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from demo import place, promotions, results
from demo.follow import follow
from demo.install import NAMESPACE, SAMPLES, Installation
from demo.kubectl import DemoError, Json
from demo.terminal import Terminal, clock
from support.cache import cache

NAME = "demo"
QUICKSTART = SAMPLES / "quickstart.yaml"
WORSE = SAMPLES / "quickstart-worse.yaml"
SECONDS_FOR_JOB = 1800


def main(arguments: list[str]) -> int:
    """Bring the demo up, or take it down."""
    parser = argparse.ArgumentParser(prog="demo", description="Fine-tune a small model, and promote it.")
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument("--name", default=NAME, help="name of the cluster (default: %(default)s)")
    parser.add_argument(
        "--environment-seconds",
        type=float,
        default=0,
        help="how long the Python environment took, for the table of stages",
    )
    options = parser.parse_args(arguments)
    try:
        with alone(options.name):
            if options.verb == "up":
                up(options.name, create_terminal(options.environment_seconds))
            else:
                down(options.name, Terminal())
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; `make demo` continues from here, `make demo-down` removes the demo",
            file=sys.stderr,
        )
        return 130
    return 0


def create_terminal(environment_seconds: float) -> Terminal:
    """A terminal for a demo whose first stage, the Python environment, is done."""
    terminal = Terminal()
    if environment_seconds >= 1:
        terminal.began -= environment_seconds
        terminal.stages.append(("the Python environment", environment_seconds))
    return terminal


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Keep other processes from bringing the same demo up, or down, meanwhile.

    Raises:
        DemoError: another process is at it.
    """
    lock = cache() / f"demo-{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, blocking=False):
            yield
    except Timeout as error:
        message = f"another `make demo` or `make demo-down` is at work on {name}: wait until it ends, or end it with Ctrl-C"
        raise DemoError(message) from error


def up(name: str, terminal: Terminal) -> None:
    """Everything from a bare machine to a registered model, and to the alias that users load it by."""
    where = place.up(name, terminal)
    installation = Installation(where, terminal)
    with terminal.stage("object store, and the Job that creates a corpus and a base model"):
        installation.object_store()
        installation.seed()
    with terminal.stage("helm install finetune-operator, with an MLflow server"):
        installation.chart()
        installation.wait_ready()
        promotions.forget(installation)
    with terminal.stage("corpus: docstrings of Python's library; base model: a small Llama"):
        installation.finish_script("seed")
    job = train(installation, QUICKSTART)
    with terminal.stage("ask the registered model, loaded by its alias in a fresh pod"):
        answer = results.ask(installation, job)
    for line in results.summary(where, job, answer):
        terminal.say(line)
    terminal.say()
    good = job["status"]["model"]["version"]
    promotions.promote(installation, good)
    worse = train(installation, WORSE)["status"]["model"]["version"]
    promotions.refuse(installation, good, worse)
    promotions.overrule(installation, worse)
    promotions.roll_back(installation, good)
    for line in promotions.summary(installation):
        terminal.say(line)
    terminal.say("\nWhat each stage took")
    for line in terminal.table():
        terminal.say(f"  {line}")
    terminal.say(f"\nAll of it took {clock(terminal.elapsed())}. `make demo-down` takes it away again.")


def train(installation: Installation, manifest: Path) -> Json:
    """Apply a FineTuneJob, after deleting an existing one, and follow it until it succeeds."""
    kubectl, terminal = installation.place.kubectl, installation.terminal
    with terminal.stage(f"kubectl apply -f {manifest.relative_to(place.REPOSITORY)}"):
        if kubectl.get("finetunejob", manifest.stem, "--namespace", NAMESPACE):
            terminal.detail(f"an earlier {manifest.stem} is there: deleting it, to run it again")
            installation.delete("finetunejob", manifest.stem)
        applied = installation.apply_job(manifest)
    with terminal.stage(f"kubectl get finetunejob {applied} --watch"):
        return follow(kubectl, applied, NAMESPACE, terminal, timeout=SECONDS_FOR_JOB)


def down(name: str, terminal: Terminal) -> None:
    """Take the demo away: with the cluster, or out of a cluster that was there before."""
    if not place.is_ours():
        terminal.say("taking the demo out of the cluster, which stays")
        Installation(place.find(name), terminal).remove()
    place.down(name)
    terminal.say("the demo is gone; what was built for it stays in the cache for the next time")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
