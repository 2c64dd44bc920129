"""Runs `trainer.command`, and ends when what the command left in `output.from` is uploaded. The pods run this file unchanged.

It runs with the Python of any image, 3.8 or later, and uses only the standard library. The container `upload` of the same pod uploads,
since the user's image cannot. The two containers share a folder: that container writes CLAIMED when output.uri belongs to this attempt,
then this one runs the command and writes REQUESTED, then that one writes DONE. Instead, that one may write FAILED with an exit code and a
termination message, with which this container ends. So the attempt fails as if the command had failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

FOLDER = Path(os.environ.get("FINETUNE_UPLOAD_PATH", "/var/run/finetune/upload"))
TERMINATION = Path(os.environ.get("FINETUNE_TERMINATION_PATH", "/dev/termination-log"))
CLAIMED, REQUESTED, DONE, FAILED = "claimed", "requested", "done", "failed"
KEEP, SHARE = "keep", "share"
"""Whether the modes of the files stay as they are, or any user may read them: the container of the upload may have another user."""
# Exit code of a pod that was stopped from outside. The next attempt uses up no restart.
_PREEMPTED = 75
_POLL_SECONDS = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stop:
    """The request to stop this container, once it has come.

    Attributes:
        grace_seconds: the seconds from SIGTERM to the deadline; 0 until the command starts, since nothing is lost before.
        child: the command while it runs; it gets the signals of this process.
        deadline: when the container must end, on the monotonic clock; None without a request.
    """

    def __init__(self) -> None:
        self.grace_seconds = 0.0
        self.child: subprocess.Popen[bytes] | None = None
        self.deadline: float | None = None

    def handle(self, number: int, _frame: object) -> None:
        """Handle a signal: pass it on to the command. SIGTERM also sets the deadline."""
        if number == signal.SIGTERM and self.deadline is None:
            self.deadline = time.monotonic() + self.grace_seconds
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(number)


def run(command: list[str], stop: Stop) -> int:
    """Run the command, and return its exit code; for a signal that ended it, the code that a shell returns."""
    try:
        stop.child = subprocess.Popen(command)
    except OSError as error:
        sys.exit(_describe_start(command, error))
    if stop.deadline is not None:
        # NB: the signal may have come before there was a child.
        stop.child.send_signal(signal.SIGTERM)
    code = stop.child.wait()
    return 128 - code if code < 0 else code


def _describe_start(command: list[str], error: OSError) -> str:
    return f"the command {command[0]} cannot be started ({error.strerror}): correct trainer.command, or use an image that has the program"


def wait_for(name: str, stop: Stop) -> None:
    """Wait until the container of the upload has written a file. If it has failed, or the deadline is over, end this process."""
    while not (FOLDER / name).exists():
        failure = FOLDER / FAILED
        if failure.exists():
            report = json.loads(failure.read_text(encoding="utf-8"))
            _exit(report["exitCode"], report["message"])
        if stop.deadline is not None and time.monotonic() >= stop.deadline:
            sentence = "the pod was stopped before the upload to output.uri was complete"
            _exit(_PREEMPTED, {"error": {"reason": "Preempted", "message": sentence}})
        time.sleep(_POLL_SECONDS)


def _exit(code: int, message: dict[str, dict[str, str]]) -> NoReturn:
    """End this process with a termination message."""
    print(message.get("error", {}).get("message", ""), file=sys.stderr, flush=True)
    if TERMINATION.parent.is_dir():
        TERMINATION.write_text(json.dumps(message), encoding="utf-8")
    sys.exit(code)


def share(folder: Path) -> None:
    """Let any user read the folder and its files."""
    for path in (folder, *folder.rglob("*")):
        # Only the owner of a file may change its mode.
        if not path.is_symlink() and path.stat().st_uid == os.getuid():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def main() -> None:
    """Run the command of the arguments: the folder, KEEP or SHARE, the seconds from SIGTERM to the end, and the command."""
    folder, mode, grace_seconds, *command = sys.argv[1:]
    # Only the first node has an upload.
    if os.environ.get("NODE_RANK", "0") != "0":
        try:
            os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
        except OSError as error:
            sys.exit(_describe_start(command, error))
    stop = Stop()
    for number in _FORWARDED:
        signal.signal(number, stop.handle)
    wait_for(CLAIMED, stop)
    stop.grace_seconds = float(grace_seconds)
    code = run(command, stop)
    if code:
        sys.exit(code)
    if mode == SHARE:
        share(Path(folder))
    (FOLDER / REQUESTED).touch()
    wait_for(DONE, stop)


if __name__ == "__main__":
    main()
