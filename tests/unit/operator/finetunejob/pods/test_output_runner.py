"""The script that runs a command and waits for the upload of its files, in a real process; the tests play the container of the upload."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_crds import contract
from finetune_operator.finetunejob.pods import output_runner
from support.waiting import wait_for

UPLOADED, WRITES = ("claimed", "done"), ["sh", "-c", "umask 077; echo weights > $OUT/model"]


class Pod:
    """The container of a command under the script, and the folder that it shares with the container of the upload."""

    def __init__(self, folder: Path) -> None:
        self.shared, self.out, self.termination = folder / "shared", folder / "out", folder / "termination"
        for path in (self.shared, self.out):
            path.mkdir()
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, command: list[str], *, rank: int = 0, mode: str = output_runner.SHARE, grace_seconds: float = 60
    ) -> subprocess.Popen[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "NODE_RANK": str(rank),
            "OUT": str(self.out),
            "FINETUNE_UPLOAD_PATH": str(self.shared),
            "FINETUNE_TERMINATION_PATH": str(self.termination),
        }
        arguments = [output_runner.__file__, str(self.out), mode, str(grace_seconds), *command]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def end(self) -> tuple[int, str]:
        """Wait for the end of the container; return its exit code and the last line of its log."""
        assert self.process is not None
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, (log.splitlines() or [""])[-1]

    def wait_until_requested(self) -> None:
        wait_for("the request to upload", (self.shared / "requested").exists)

    def write(self, *names: str) -> None:
        for name in names:
            (self.shared / name).touch()

    def fail(self, code: int, reason: str, message: str) -> None:
        error = contract.PodError(reason=reason, message=message)
        report = contract.RunReport(exit_code=code, message=contract.TerminationMessage(error=error))
        (self.shared / "failed").write_text(report.model_dump_json(by_alias=True, exclude_none=True))

    def message(self) -> tuple[str, str] | None:
        """Return the reason and the sentence of the termination message; None without one."""
        if not self.termination.exists():
            return None
        parsed = contract.TerminationMessage.parse(self.termination.read_text())
        assert parsed is not None
        assert parsed.error is not None
        return parsed.error.reason, parsed.error.message


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_both_containers_use_the_same_names() -> None:
    names = (output_runner.CLAIMED, output_runner.REQUESTED, output_runner.DONE, output_runner.FAILED)
    assert names == (
        contract.UPLOAD_CLAIMED,
        contract.UPLOAD_REQUESTED,
        contract.UPLOAD_DONE,
        contract.UPLOAD_FAILED,
    )
    assert Path(contract.UPLOAD_PATH) == output_runner.FOLDER


def test_the_container_ends_when_the_upload_is_complete(pod: Pod) -> None:
    process = pod.start(WRITES)
    pod.write("claimed")
    pod.wait_until_requested()
    assert (pod.out / "model").read_text() == "weights\n"
    assert process.poll() is None
    pod.write("done")
    assert pod.end() == (0, "")
    assert pod.message() is None


# The mode of a file that its command wrote for its own user.
MODES = {output_runner.SHARE: 0o644, output_runner.KEEP: 0o600}


@pytest.mark.parametrize(("mode", "expected"), MODES.items())
def test_files_that_are_no_volume_of_the_user_are_readable(pod: Pod, mode: str, expected: int) -> None:
    pod.write(*UPLOADED)
    pod.start(WRITES, mode=mode)
    assert pod.end() == (0, "")
    assert stat.S_IMODE((pod.out / "model").stat().st_mode) == expected


# A command, and the exit code and the last line of the log with which the container ends. Nothing is uploaded.
FAILURES: dict[str, tuple[list[str], int, str]] = {
    "the command fails": (["sh", "-c", "echo no gradient >&2; exit 3"], 3, "no gradient"),
    "the command is killed": (["sh", "-c", "kill -9 $$"], 137, ""),
    "there is no such command": (
        ["no-such-program"],
        1,
        (
            "the command no-such-program cannot be started (No such file or directory): correct trainer.command, or use an image that "
            "has the program"
        ),
    ),
}


@pytest.mark.parametrize(("command", "code", "line"), FAILURES.values(), ids=FAILURES)
def test_a_command_that_fails_uploads_nothing(pod: Pod, command: list[str], code: int, line: str) -> None:
    pod.write(*UPLOADED)
    pod.start(command)
    assert pod.end() == (code, line)
    assert not (pod.shared / "requested").exists()


def test_the_command_does_not_start_if_the_folder_is_refused(pod: Pod) -> None:
    pod.fail(64, "OutputTaken", "output.uri s3://a/b is the model of another job")
    pod.start(WRITES)
    assert pod.end() == (64, "output.uri s3://a/b is the model of another job")
    assert [*pod.out.iterdir()] == []
    assert pod.message() == ("OutputTaken", "output.uri s3://a/b is the model of another job")


def test_an_upload_that_fails_fails_the_container(pod: Pod) -> None:
    pod.write("claimed")
    pod.start(WRITES)
    pod.wait_until_requested()
    pod.fail(1, "OutputUnwritable", "output.uri s3://a/b cannot be written: SlowDown")
    assert pod.end()[0] == 1
    assert pod.message() == ("OutputUnwritable", "output.uri s3://a/b cannot be written: SlowDown")


def test_other_nodes_have_no_upload(pod: Pod) -> None:
    pod.start(["sh", "-c", "exit 5"], rank=1)
    assert pod.end()[0] == 5
    assert [*pod.shared.iterdir()] == []


SAVES = "trap 'echo saved > $OUT/model; exit 75' TERM; touch $OUT/started; while :; do sleep 0.05; done"


def test_a_command_saves_when_its_pod_is_stopped(pod: Pod) -> None:
    pod.write("claimed")
    process = pod.start(["sh", "-c", SAVES])
    wait_for("the command to start", (pod.out / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert pod.end()[0] == contract.EXIT_PREEMPTED
    assert (pod.out / "model").read_text() == "saved\n"


STOPPED = ("Preempted", "the pod was stopped before the upload to output.uri was complete")


def test_an_upload_in_progress_may_use_the_grace_period(pod: Pod) -> None:
    pod.write("claimed")
    process = pod.start(WRITES)
    pod.wait_until_requested()
    process.send_signal(signal.SIGTERM)
    pod.write("done")
    assert pod.end()[0] == 0


# Which files the container of the upload has written when the pod is stopped.
STOPS: dict[str, list[str]] = {"before the command starts": [], "after the grace period": ["claimed"]}


@pytest.mark.parametrize("written", STOPS.values(), ids=STOPS)
def test_a_pod_that_is_stopped_in_an_upload_counts_as_preempted(pod: Pod, written: list[str]) -> None:
    pod.write(*written)
    process = pod.start(["sh", "-c", "touch $OUT/started"], grace_seconds=0.5)
    if written:
        pod.wait_until_requested()
    else:
        wait_for("the handler of SIGTERM", lambda: _handles_sigterm(process.pid))
    process.send_signal(signal.SIGTERM)
    assert pod.end()[0] == contract.EXIT_PREEMPTED
    assert pod.message() == STOPPED
    assert (pod.out / "started").exists() == bool(written)


def _handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
