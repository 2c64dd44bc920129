"""The store of output.uri answers each request with status 503: the upload goes on when it no longer does, and ends some time before."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from fixtures.operator_processes.faults import Fault
from fixtures.operator_processes.linked_stores import KINDS, linked_store
from fixtures.operator_processes.upload_process import Ended
from support.waiting import wait_for

# After how many minutes the upload gives up, at least and at most. The clients repeat requests themselves: that of Azure for 84 s, that of
# Databricks for five minutes, and it sends three requests before the first answer of the Files API.
MINUTES = {"s3": (6, 7), "gs": (6, 8), "azure": (6, 9), "volumes": (6, 17)}
# What each client reports.
SENTENCES = {
    "s3": "Service Unavailable",
    "gs": "busy, 503",
    "azure": "(None) busy",
    "volumes": "Timed out after 0:05:00",
}
_BUSY = {"error": {"message": "busy"}, "error_code": "TEMPORARILY_UNAVAILABLE", "message": "busy"}


def test_azure_is_asked_again(tmp_path: Path) -> None:
    with linked_store("azure", tmp_path / "store") as linked:
        pod = linked.pod(tmp_path / "pod")
        linked.be_busy(1)
        pod.leave({"config.json": b"{}"})
        assert pod.run() == Ended(0)
        assert not linked.is_busy


def test_an_upload_gives_up(tmp_path: Path) -> None:
    """All stores at once, since each takes minutes."""
    with ExitStack() as stack:
        pods = {}
        for name in KINDS:
            linked = stack.enter_context(linked_store(name, tmp_path / f"store-{name}"))
            pod = pods[name] = linked.pod(tmp_path / name)
            stack.enter_context(pod.running())
            wait_for("the claim", (pod.shared / "claimed").exists, instead=pod.log)
            linked.link.faults = [Fault("", 503, _BUSY) for _ in range(10_000)]
            pod.leave({"config.json": b"{}"})
        began = time.monotonic()
        minutes: dict[str, float] = {}
        while len(minutes) < len(pods):
            for name, pod in pods.items():
                if name not in minutes and (pod.shared / "failed").exists():
                    minutes[name] = (time.monotonic() - began) / 60
            assert time.monotonic() - began < 20 * 60, minutes
            time.sleep(1)
        endings = {name: pod.wait_for_end() for name, pod in pods.items()}
    print(f"gave up after {minutes} minutes")
    assert endings == {
        name: Ended(
            1, "OutputUnwritable", f"output.uri {pods[name].uri} cannot be written: {SENTENCES[name]}"
        )
        for name in KINDS
    }
    assert {
        name: MINUTES[name][0] <= took <= MINUTES[name][1] for name, took in minutes.items()
    } == dict.fromkeys(KINDS, True)
