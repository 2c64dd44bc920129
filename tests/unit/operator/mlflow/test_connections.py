"""MLflow is imported when it is first needed, by whichever thread that is."""

from __future__ import annotations

import subprocess
import sys

TOGETHER = """
import threading
from finetune_operator.errors import ExternalError
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.mlflow.runs import Server

nowhere, gate, said = "http://127.0.0.1:9", threading.Barrier(8), set()
registry, tracking = MlflowRegistry(nowhere, nowhere), Server(nowhere, nowhere)

def first(ask):
    gate.wait()
    try:
        ask()
    except ExternalError as error:
        said.add(error.problem.reason.value)

asks = (
    lambda: registry.model("a"),
    lambda: registry.set_alias("a", "b", "1"),
    lambda: tracking.find_run("uid", "experiment"),
    lambda: tracking.finish_run("run", "FINISHED"),
)
threads = [threading.Thread(target=first, args=[asks[n % 4]]) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(said)
"""


def test_threads_that_need_mlflow_at_once_all_get_it() -> None:
    # In a process of its own: in this one MLflow may have been imported already.
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("{'MlflowUnreachable'}", "")
