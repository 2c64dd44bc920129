"""The process of a sink: what it does when its tracker is away, refuses it, or has no client in the image."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.sinks.__main__ import write_all
from finetune_trainer.sinks.entries import End, Metrics, Settings, encode
from support.ports import free_port
from support.trackers import read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from finetune_trainer.sinks.entries import Entry

ENTRIES = [Metrics(step, float(step), {"loss": 1.0}) for step in (1, 2, 3)]


class RefusedError(Exception):
    """A retry cannot succeed."""


@dataclass
class Tracker:
    """A tracker that raises the errors of a test, one for each call, and then keeps entries."""

    errors: list[Exception] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    is_closed: bool = False
    label = "The tracker"

    def add(self, entry: Entry) -> None:
        self._fail()
        self.entries.append(entry)

    def publish(self) -> None:
        self._fail()

    def close(self) -> None:
        self._fail()
        self.is_closed = True

    def is_final(self, error: Exception) -> bool:
        return isinstance(error, RefusedError)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def write(tracker: Tracker) -> int:
    """Write all entries; returns the number of pauses."""
    lines: list[str | None] = ["", *(f"{encode(entry)}\n" for entry in ENTRIES), None]
    pauses: list[None] = []
    write_all(tracker, lambda: lines.pop(0), lambda: pauses.append(None))
    return len(pauses)


def test_entries_are_kept_while_the_tracker_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker([OSError("no route\nto host")] * 4)
    assert write(tracker) == 4
    assert (tracker.entries, tracker.is_closed) == (ENTRIES, True)
    assert capsys.readouterr().out.splitlines() == [
        "The tracker is unreachable; the job goes on without it: no route",
        "The tracker is reachable again",
    ]


def test_a_refusal_ends_the_sink(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker([RefusedError("bad key")])
    assert write(tracker) == 0
    assert (tracker.entries, tracker.is_closed) == ([], False)
    assert capsys.readouterr().out == "The tracker refuses the metrics; the job goes on without it: bad key\n"


@pytest.mark.parametrize(
    ("kind", "package"), [("TensorBoard", "tensorboard"), ("WandB", "wandb")], ids=["tensorboard", "wandb"]
)
def test_an_image_without_the_client_is_reported(tmp_path: Path, kind: str, package: str) -> None:
    settings = Settings(kind, str(tmp_path), "uid", "tune", "attempt-1")  # type: ignore[arg-type]
    # None in sys.modules makes the import fail.
    program = (
        f"import sys; sys.modules[{package!r}] = None\nfrom finetune_trainer.sinks import __main__\n"
        "sys.exit(__main__.main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=f"{settings.encode()}\n{encode(ENTRIES[0])}\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (ended.stdout, ended.stderr) == (
        f"{package} is not installed in this image; the job goes on without {kind}: use the trainer image, or install {package} in "
        "yours\n",
        "",
    )


def test_a_process_ends_with_the_last_entry_even_if_its_pipe_stays_open(tmp_path: Path) -> None:
    """A process that the rank has forked has the pipe too."""
    settings = Settings("TensorBoard", str(tmp_path), "uid", "tune", "attempt-1")
    command = [sys.executable, "-m", "finetune_trainer.sinks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(f"{settings.encode()}\n{encode(ENTRIES[0])}\n{encode(End(0))}\n")
        process.stdin.flush()
        assert process.wait(timeout=120) == 0
    assert read_events(tmp_path) == {"loss": [(1, 1.0)]}


@contextmanager
def refused() -> Iterator[str]:
    """The address of a server that is down."""
    yield f"http://127.0.0.1:{free_port()}"


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("server", "key", "report"),
    [
        (refused, "0" * 40, "W&B's project support is unreachable; the job goes on without it"),
        (black_hole, "0" * 40, "W&B's project support is unreachable; the job goes on without it"),
        (refused, "", "W&B's project support refuses the metrics; the job goes on without it"),
    ],
    ids=["refused", "black hole", "no key"],
)
def test_a_server_of_wandb_that_is_away_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[], AbstractContextManager[str]],
    key: str,
    report: str,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = Settings("WandB", "support", "uid", "tune", "attempt-1")
    with server() as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer.sinks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{settings.encode()}\n{encode(ENTRIES[0])}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            process.kill()
    assert line.startswith(f"{report}: "), line
