"""A rank adds no variable to its environment while it has other threads: native code may read the environment there, and the rank ends."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod
    from support.training import Mlflow

# Python imports it when a process starts. NB: `os.environ` has a variable only after `putenv` has added it.
_WATCH = """
import os, sys, threading

def watch(event, arguments):
    # The thread of the signal handler runs no native code.
    threads = {{thread.name for thread in threading.enumerate()}} - {{"MainThread", "sigterm"}}
    if event == "os.putenv" and threads and arguments[0] not in os.environb:
        with open({file!r}, "a") as file:
            print(os.fsdecode(arguments[0]), threads, file=file)

sys.addaudithook(watch)
"""


def test_a_run_adds_no_variable_while_threads_run(pod: Pod, mlflow: Mlflow, tmp_path: Path) -> None:
    added = tmp_path / "added"
    (tmp_path / "sitecustomize.py").write_text(_WATCH.format(file=str(added)))
    pod = pod.but(
        {
            "training.maxSteps": 2,
            "training.evalEverySteps": 1,
            "training.compile": True,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 1},
            "register": {"model": "tiny", "upload": "Direct"},
            "tracking.sinks": [{"type": "TensorBoard", "uri": str(tmp_path / "tensorboard")}],
            "tracking.systemMetrics": True,
        }
    )
    pod.env |= mlflow.env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    outcome = pod.run()
    assert outcome.code == 0, outcome.output
    assert not added.exists(), added.read_text()
