"""`python -m demo up|down`: from a corpus to a champion and back, on a cluster of this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from demo import place, promotions, rerun, results
from demo.follow import follow
from demo.install import NAMESPACE, Installation
from demo.kubectl import DemoError, Json
from demo.rerun import QUICKSTART, WORSE
from demo.terminal import Terminal, clock
from support.cache import cache

NAME = "demo"


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
        is_half_done = rerun.clean_up(installation)
    with terminal.stage("corpus: docstrings of Python's library; base model: a small Llama"):
        installation.finish_script("seed")
    job = train(installation, QUICKSTART)
    good = job["status"]["model"]["version"]
    if not is_half_done:
        show_results(installation, job)
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


def show_results(installation: Installation, job: Json) -> None:
    """Ask the registered model, and print what the job left."""
    terminal = installation.terminal
    with terminal.stage("ask the registered model, loaded by its alias in a fresh pod"):
        answer = results.ask(installation, job)
    for line in results.summary(installation.place, job, answer):
        terminal.say(line)
    terminal.say()


def train(installation: Installation, manifest: Path) -> Json:
    """Follow a FineTuneJob until it succeeds. It is applied unless an earlier one is there that has not failed."""
    kubectl, terminal = installation.place.kubectl, installation.terminal
    name = manifest.stem
    with terminal.stage(f"kubectl apply -f {manifest.relative_to(place.REPOSITORY)}"):
        earlier = kubectl.get("finetunejob", name, "--namespace", NAMESPACE)
        phase = rerun.read_phase(earlier)
        if earlier and phase == "Failed":
            terminal.detail(f"an earlier {name} has failed: deleting it, to run it again")
            installation.delete("finetunejob", name)
        if earlier and phase != "Failed":
            terminal.detail(f"an earlier {name} is {phase or 'Pending'}: following it")
        else:
            installation.apply(manifest)
    with terminal.stage(f"kubectl get finetunejob {name} --watch"):
        return follow(kubectl, name, NAMESPACE, terminal)


def down(name: str, terminal: Terminal) -> None:
    """Take the demo away: with the cluster, or out of a cluster that was there before."""
    if not place.is_ours():
        terminal.say("taking the demo out of the cluster, which stays")
        Installation(place.find(name), terminal).remove()
    place.down(name)
    terminal.say("the demo is gone; what was built for it stays in the cache for the next time")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
