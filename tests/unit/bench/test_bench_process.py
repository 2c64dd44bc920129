"""Commands of the benchmark leave nothing behind, however they end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.trainer import process
from bench.trainer.process import RunFailedError

# A child in a session of its own, as torchrun starts its workers; it outlives the parent unless it is ended.
CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('child', child.pid, flush=True)\n"
)


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.mark.parametrize(
    ("then", "seconds", "expected"),
    [
        ("raise SystemExit(3)", 60.0, "ended with exit code 3"),
        ("time.sleep(600)", 2.0, "took longer than 2 s"),
    ],
)
def test_a_command_that_fails_says_how_and_leaves_no_process(
    tmp_path: Path, then: str, seconds: float, expected: str
) -> None:
    children: list[int] = []
    with pytest.raises(RunFailedError, match=expected):
        process.run(
            [sys.executable, "-c", CHILD + then],
            os.environ,
            folder=tmp_path,
            seconds=seconds,
            on_line=lambda line: children.append(int(line.text.split()[1])),
        )
    assert [ended(child) for child in children] == [True]


def test_lines_come_with_their_time(tmp_path: Path) -> None:
    script = "import time; print('one', flush=True); time.sleep(0.2); print('two')"
    first, second = process.run([sys.executable, "-c", script], os.environ, folder=tmp_path, seconds=60)
    assert (first.text, second.text) == ("one", "two")
    assert second.when - first.when > 0.1
