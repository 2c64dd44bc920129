"""The process of the preparation."""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import signal
from finetune_trainer.pod.exit_status import exit_on_sigterm
exit_on_sigterm()
print("ready", flush=True)
signal.pause()
"""


def test_it_ends_at_once_when_it_is_told_to() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
