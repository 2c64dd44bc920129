"""MLflow is imported when it is first needed, by whichever thread that is."""

from __future__ import annotations

import subprocess
import sys

TOGETHER = """
import threading
from finetune_operator.mlflow_host import Host

host, gate, failed = Host("http://127.0.0.1:9"), threading.Barrier(8), []

def first(ask):
    gate.wait()
    try:
        ask()
    except BaseException as error:
        failed.append(repr(error))

threads = [threading.Thread(target=first, args=[(host.tracking, host.registry)[n % 2]]) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed)
"""


def test_threads_that_need_mlflow_at_once_all_get_it() -> None:
    # In a process of its own: in this one MLflow may have been imported already.
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
