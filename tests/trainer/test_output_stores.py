"""output.from in stores: the process of the container `upload` on servers with the APIs of S3, Google Cloud Storage, Azure, Databricks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.models.output_folder import Manifest
from fixtures.operator_processes.linked_stores import KINDS, LinkedStore, linked_store
from fixtures.operator_processes.upload_process import Ended, Stored, read_stored
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB, UID = "team/tune", "0f1e2d3c-0000-4000-8000-000000000001"
FILES = {
    "checkpoint-8/optimizer.pt": b"state",
    "checkpoint-8/shards/0 of 2.bin": b"half",
    "empty": b"",
    "logs/50% done #1?.txt": b"odd",
    "logs/step+1&2=3.txt": b"odd too",
    "x#123": b"no generation",
    "größe.txt": b"latin",
    "config.json": b"{}",
}
LARGE = "model.safetensors"


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedStore]:
    with linked_store(request.param, tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def linked(server: LinkedStore, monkeypatch: pytest.MonkeyPatch) -> LinkedStore:
    """The store, with its login in the variables of this process too."""
    for name, value in server.store.env.items():
        monkeypatch.setenv(name, value)
    server.link.faults = []
    server.link.held_requests = ""
    return server


def complete(files: dict[str, bytes]) -> Stored:
    """What an upload of these files leaves."""
    return Stored(Manifest(JOB, UID, 1, {name: len(content) for name, content in files.items()}), files)


def test_an_upload_that_was_killed_is_completed_by_its_next_start(
    linked: LinkedStore, tmp_path: Path
) -> None:
    pod = linked.pod(tmp_path)
    large = b"".join(number.to_bytes(2, "big") * 2**19 for number in range(linked.kind.large_mib))
    files = FILES | {LARGE: large}
    pod.leave(files)
    linked.link.held, linked.link.held_requests = 0, linked.kind.begins_large
    with pod.running():
        wait_for("the large file to begin", lambda: linked.link.held > 0, instead=pod.log)
    # Whoever reads the folder now finds that it has no complete model.
    before = {name: content for name, content in FILES.items() if name < LARGE and name != "config.json"}
    assert read_stored(pod.uri) == Stored(Manifest(JOB, UID, 1, None, sorted(files)), before)

    linked.link.held_requests = ""
    assert pod.run() == Ended(0)
    assert read_stored(pod.uri) == complete(files)


@pytest.mark.parametrize("server", [name for name, kind in KINDS.items() if any(kind.busy)], indirect=True)
def test_a_store_that_is_busy_is_asked_again_before_and_after_the_command(
    linked: LinkedStore, tmp_path: Path
) -> None:
    pod = linked.pod(tmp_path)
    before, after = linked.kind.busy
    linked.be_busy(before)
    with pod.running():
        wait_for("the claim", (pod.shared / "claimed").exists, instead=pod.log)
        assert not linked.is_busy
        linked.be_busy(after)
        pod.leave(FILES)
        assert pod.wait_for_end() == Ended(0)
    assert not linked.is_busy
    assert read_stored(pod.uri) == complete(FILES)


def test_a_store_that_refuses_the_login_fails_the_job_before_its_command(
    linked: LinkedStore, tmp_path: Path
) -> None:
    pod = linked.pod(tmp_path, has_wrong_login=True)
    linked.link.faults = [linked.kind.refused] if linked.kind.refused else []
    assert pod.run() == Ended(
        64,
        "OutputForbidden",
        f"output.uri {pod.uri} cannot be written with the pod's credentials: grant these credentials access",
    )
    assert not (pod.shared / "claimed").exists()


def test_an_attempt_that_a_later_one_has_replaced_uploads_nothing(
    linked: LinkedStore, tmp_path: Path
) -> None:
    pod = linked.pod(tmp_path)
    with pod.running():
        wait_for("the claim", (pod.shared / "claimed").exists, instead=pod.log)
        pod.target(attempt=2).claim()
        pod.leave({"config.json": b"{}"})
        assert pod.wait_for_end() == Ended(
            75,
            "Superseded",
            f"attempt 2 of the job writes output.uri {pod.uri}: this attempt does not publish the model",
        )
    assert read_stored(pod.uri) == Stored(Manifest(JOB, UID, 2), {})
