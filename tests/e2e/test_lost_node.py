"""A node loses power, and the run goes on elsewhere.

The node is one of a cluster of its own, so that no other test loses pods. The operator runs on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import backends, local
from e2e.own_cluster import NAMESPACE, build_job, own_cluster
from support.api import Api
from support.operator_process import operator_process, watching
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
CLUSTER, NAME = "powercut", "tune"
LOST_NODE, OTHER_NODE = f"{CLUSTER}-2", f"{CLUSTER}-1"
# The first attempt trains until it is stopped, the next one ends soon.
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
time.sleep(600 if os.environ["FINETUNE_ATTEMPT"] == "1" else 1)
"""


@pytest.fixture
def api() -> Iterator[Api]:
    """A cluster of two nodes with our CRDs."""
    with own_cluster(CLUSTER) as server:
        yield server


def find_pods(api: Api) -> dict[str, tuple[str, str]]:
    """The node and the phase of each training pod, by attempt and rank."""
    pods = api.list("Pod", NAMESPACE, f"finetune.dev/job={NAME}")
    return {
        pod["metadata"]["name"].rpartition("-")[0]: (
            pod["spec"].get("nodeName", ""),
            pod["status"]["phase"],
        )
        for pod in pods
    }


@pytest.mark.skipif(backends.choose()[0] != "local", reason="powers off a node of a local cluster")
def test_a_run_goes_on_elsewhere_when_its_node_loses_power(api: Api, tmp_path: Path) -> None:
    settings = watching(NAMESPACE, "", resync_seconds=1)

    def read_status() -> Json:
        job = api.get("FineTuneJob", NAMESPACE, NAME)
        assert job is not None
        return dict(job.get("status") or {})

    def wait_for_phase(phase: str) -> Json:
        def reached() -> Json | None:
            status = read_status()
            return status if status.get("phase") == phase else None

        return wait_for(f"{NAME} is {phase}", reached, 120, instead=lambda: str(read_status()))

    log = tmp_path / "operator.log"
    with running(operator_process(api.kubeconfig, log, settings)):
        # The scheduler spreads the pods over both nodes as long as both are there.
        api.create(
            build_job(
                NAME,
                ["python3", "-c", SCRIPT],
                distributed={"nodes": 2, "nodeLostSeconds": 1},
                runPolicy={"maxRestarts": 0},
            )
        )
        wait_for_phase("Training")
        assert sorted(node for node, _ in find_pods(api).values()) == [OTHER_NODE, LOST_NODE]
        local.ask(CLUSTER, "crash", LOST_NODE)

        status = wait_for_phase("Succeeded")
        assert (status["attempt"], status["restarts"]) == (2, 0)
        failure = status["lastFailure"]
        assert (failure["reason"], failure["node"], failure["attempt"]) == ("NodeLost", LOST_NODE, 1)
        lost_pod = failure["pod"].rpartition("-")[0]
        done = (OTHER_NODE, "Succeeded")
        assert find_pods(api) == {
            lost_pod: (LOST_NODE, "Running"),
            f"{NAME}-train-2-0": done,
            f"{NAME}-train-2-1": done,
        }

        local.ask(CLUSTER, "start", LOST_NODE)
        wait_for("the lost pod is gone", lambda: lost_pod not in find_pods(api), 60)
