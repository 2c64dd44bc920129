"""Processes: started, killed, told apart, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.paths import ClusterError
from cluster.process import end, run, start_time
from support.process import Process
from support.waiting import WaitError, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_starts_stops_and_starts_again(tmp_path: Path) -> None:
    process = Process("sleeper", ["sh", "-c", "echo here; exec sleep 60"], tmp_path / "logs" / "sleeper.log")
    process.start()
    first = process.pid
    wait_for("a word", lambda: process.tail() == "here", 5, process)
    process.kill()
    assert not process.alive()
    process.start()
    assert process.pid not in {None, first}
    process.stop()
    assert process.pid is None


def test_who_waits_is_told_that_the_process_ended(tmp_path: Path) -> None:
    process = Process("brief", ["sh", "-c", "echo no such flag; exit 3"], tmp_path / "brief.log")
    process.start()
    with pytest.raises(WaitError, match=r"brief ended while waiting for it:\nno such flag"):
        wait_for("it", lambda: False, 5, process)


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from support.process import Process
process = Process("sleeper", ["sleep", "60"], Path({str(tmp_path / "log")!r}))
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for("the child", lambda: "sleep" in Path(f"/proc/{child}/comm").read_text())
        parent.send_signal(signal.SIGKILL)
    wait_for("the end of the child", lambda: start_time(child) is None)


def test_a_process_is_ended_only_if_it_is_the_one_meant() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        started = start_time(sleeper.pid)
        assert started is not None
        end(sleeper.pid, started + 1)
        assert sleeper.poll() is None
        end(sleeper.pid, started)
        assert sleeper.wait() == -signal.SIGTERM


def test_a_failing_program_says_why() -> None:
    with pytest.raises(ClusterError, match=r"failed \(2\): no"):
        run("sh", "-c", "echo no >&2; exit 2")
    with pytest.raises(ClusterError, match="is not installed"):
        run("no-such-program-here")
