"""The container that uploads what a command left: from a claim to the last file, and what it tells the command's container."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem

from finetune_crds import contract
from finetune_crds.recipe import JobReference
from finetune_operator.finetunejob.pods import output_runner
from finetune_trainer.models import upload
from finetune_trainer.models.output_folder import MANIFEST, ModelFolder
from finetune_trainer.pod import exit_status
from support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

JOB = JobReference(name="alpaca", namespace="team", uid="0001")
OTHER = JobReference(name="other", namespace="team", uid="0002")
FILES = {"config.json": "{}", "model.safetensors": "weights", "checkpoints/last.pt": "state"}


class Pod:
    """What the two containers of a pod share, and the recipe."""

    def __init__(self, folder: Path) -> None:
        self.shared, self.source, self.target = folder / "shared", folder / "outputs", folder / "store/model"
        for path in (self.shared, self.source):
            path.mkdir()
        self.recipe = folder / "recipe.yaml"
        output = {"uri": str(self.target), "from": str(self.source)}
        self.recipe.write_text(yaml.safe_dump({"kind": "Recipe", "job": JOB.to_json(), "output": output}))
        self.termination = folder / "termination"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FINETUNE_RECIPE": str(self.recipe),
            "FINETUNE_UPLOAD_PATH": str(self.shared),
            "FINETUNE_TERMINATION_PATH": str(self.termination),
            "NODE_RANK": "0",
        }

    def leave(self, files: dict[str, str]) -> None:
        """Write what the command leaves, and request the upload."""
        for name, text in files.items():
            (self.source / name).parent.mkdir(exist_ok=True)
            (self.source / name).write_text(text)
        (self.shared / "requested").touch()

    def upload(self) -> tuple[int, str, str]:
        """Run the upload; return the exit code, and the reason and the sentence of the error that the other container reads."""
        code = exit_status.run(
            lambda: upload.upload(self.shared),
            lambda code, message: upload.report(self.shared, code, message),
        )
        failed = self.shared / "failed"
        assert failed.exists() != (self.shared / "done").exists()
        if not failed.exists():
            return code, "", ""
        report = contract.RunReport.parse(failed.read_bytes())
        assert report is not None
        assert report.message.error is not None
        assert report.exit_code == code
        return code, report.message.error.reason, report.message.error.message

    def uploaded(self) -> dict[str, str]:
        files = (path for path in self.target.rglob("*") if path.is_file() and path.name != MANIFEST)
        return {str(path.relative_to(self.target)): path.read_text() for path in files}


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    made = Pod(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FINETUNE_ATTEMPT", "1")
    monkeypatch.setattr(upload, "_RETRY_DELAYS_SECONDS", (0.2, 0.2))
    return made


def test_what_the_command_left_is_uploaded(pod: Pod) -> None:
    pod.leave(FILES)
    assert pod.upload() == (0, "", "")
    assert pod.uploaded() == FILES
    assert (pod.shared / "claimed").exists()


def test_the_next_attempt_replaces_what_an_earlier_one_uploaded(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.leave({**FILES, "old.txt": "old"})
    assert pod.upload() == (0, "", "")
    # NB: another node failed after that, so the attempt failed, and the files of the next one are others.
    for path in pod.shared.iterdir():
        path.unlink()
    (pod.source / "old.txt").unlink()
    pod.leave({"model.safetensors": "better"})
    monkeypatch.setenv("FINETUNE_ATTEMPT", "2")
    assert pod.upload() == (0, "", "")
    assert pod.uploaded() == {**FILES, "model.safetensors": "better"}


def fail_puts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the storage fail the first files that are written to it."""
    put, failures = LocalFileSystem.put_file, iter(range(count))

    def fail_first(self: LocalFileSystem, path: str, target: str, **options: Any) -> None:
        if next(failures, None) is not None:
            raise OSError("SlowDown")
        put(self, path, target, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", fail_first)


def test_a_storage_that_fails_is_tried_again(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_puts(monkeypatch, 2)
    pod.leave(FILES)
    assert pod.upload() == (0, "", "")
    assert pod.uploaded() == FILES


# What the storage says to the first requests, how many get it, and the exit code, the reason and the number of requests after which the
# claim ends. A refusal before the command is final.
CLAIMS: dict[str, tuple[Exception, int, tuple[int, str, int]]] = {
    "goes on": (OSError("SlowDown"), 2, (0, "", 3)),
    "stays away": (OSError("SlowDown"), 3, (1, "OutputUnwritable", 3)),
    "refuses": (PermissionError("no access"), 3, (64, "OutputForbidden", 1)),
}


@pytest.mark.parametrize(("error", "count", "expected"), CLAIMS.values(), ids=CLAIMS)
def test_a_claim_asks_again(
    pod: Pod,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    count: int,
    expected: tuple[int, str, int],
) -> None:
    take, requests = ModelFolder._take, []

    def fail_first(self: ModelFolder) -> None:
        requests.append(self.uri)
        if len(requests) <= count:
            raise error
        take(self)

    monkeypatch.setattr(ModelFolder, "_take", fail_first)
    pod.leave(FILES)
    code, reason, _ = pod.upload()
    assert (code, reason, len(requests)) == expected
    assert (pod.shared / "claimed").exists() == (code == 0)


def test_a_storage_whose_client_takes_longer_than_all_pauses_is_asked_once(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def time_out(self: LocalFileSystem, *_: str) -> None:
        requests.append(self)
        time.sleep(0.5)
        raise TimeoutError("timed out")

    monkeypatch.setattr(LocalFileSystem, "put_file", time_out)
    pod.leave(FILES)
    assert pod.upload()[:2] == (1, "OutputUnwritable")
    assert len(requests) == 1


def fail_storage(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_puts(monkeypatch, 3)
    pod.leave(FILES)


def take_target(pod: Pod, _: pytest.MonkeyPatch) -> None:
    ModelFolder(str(pod.target), OTHER, 1).claim()


def supersede(pod: Pod, _: pytest.MonkeyPatch) -> None:
    ModelFolder(str(pod.target), JOB, 2).claim()


def leave_nothing(pod: Pod, _: pytest.MonkeyPatch) -> None:
    pod.leave({})


def leave_link(pod: Pod, _: pytest.MonkeyPatch) -> None:
    (pod.source / "environ").symlink_to("/proc/self/environ")
    pod.leave(FILES)


def leave_unreadable(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.leave(FILES)
    # NB: these tests may run as root, who may read everything.
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).endswith("model.safetensors"))


def kill_five_times(pod: Pod, _: pytest.MonkeyPatch) -> None:
    (pod.shared / "starts").write_text("5")


# What happens, and the exit code, the reason and the sentence with which the command's container ends; {} is the folder of the test.
FAILURES = {
    "the storage fails": (
        fail_storage,
        1,
        "OutputUnwritable",
        "output.uri {}/store/model cannot be written: SlowDown",
    ),
    "another job's folder": (
        take_target,
        64,
        "OutputTaken",
        "output.uri {}/store/model contains files that FineTuneJob team/other started to write: choose another folder, or empty it",
    ),
    "a later attempt": (
        supersede,
        75,
        "Superseded",
        "attempt 2 of the job writes output.uri {}/store/model: this attempt does not publish the model",
    ),
    "nothing was written": (
        leave_nothing,
        64,
        "OutputMissing",
        "the command ended with exit code 0 and left no files in output.from {}/outputs: let it write its result there",
    ),
    "a link to the credentials": (
        leave_link,
        64,
        "OutputUnreadable",
        "{}/outputs/environ is a link out of output.from: let your command write a copy of the file",
    ),
    "a file of another user": (
        leave_unreadable,
        64,
        "OutputUnreadable",
        "the container upload cannot read {}/outputs/model.safetensors: let your command make it readable for all users",
    ),
    "the container is killed again and again": (
        kill_five_times,
        1,
        "OutputUploadKilled",
        "the container upload was killed 5 times before the upload to {}/store/model was complete: kubectl describe pod shows why; "
        "if it ran out of memory, raise the limit of the init container upload in pods.train.template",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_told_to_the_container_of_the_command(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    happens, code, reason, sentence = FAILURES[failure]
    happens(pod, monkeypatch)
    assert pod.upload() == (code, reason, sentence.format(tmp_path))
    assert not pod.target.exists() or pod.uploaded() == {}


def test_a_link_within_the_folder_is_uploaded_as_a_file(pod: Pod) -> None:
    pod.leave(FILES)
    (pod.source / "last.pt").symlink_to("checkpoints/last.pt")
    assert pod.upload() == (0, "", "")
    assert pod.uploaded() == {**FILES, "last.pt": "state"}


def test_both_containers_upload_what_a_command_writes(tmp_path: Path) -> None:
    """The containers as processes: the command starts after the claim, and its container ends after the upload."""
    pod = Pod(tmp_path)
    script = f"test -e {pod.target / MANIFEST} && echo weights > {pod.source}/model.safetensors"
    runner = [output_runner.__file__, str(pod.source), output_runner.SHARE, "60", "sh", "-c", script]
    environment = {**os.environ, **pod.environment}
    with (
        subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer.models.upload"], env=environment
        ) as sidecar,
        subprocess.Popen([sys.executable, *runner], env=environment) as command,
    ):
        try:
            assert command.wait(timeout=60) == 0
            assert pod.uploaded() == {"model.safetensors": "weights\n"}
            wait_for("the upload to be reported", (pod.shared / "done").exists)
        finally:
            sidecar.terminate()
    assert sidecar.returncode == 0
