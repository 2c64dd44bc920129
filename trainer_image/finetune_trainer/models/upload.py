"""Uploads what a command of the user left in `output.from` to `output.uri`: the container beside the command's, with this image.

The two containers share a folder, in which files are the messages: the operator's `output_runner` describes them. This container runs
until the pod ends, whether the upload has succeeded or failed: the command's container ends with the exit code.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from finetune_crds import contract
from finetune_crds.contract import RunReport, TerminationMessage
from finetune_crds.recipe import JobRecipe, RecipeError
from finetune_trainer.models.output_folder import ModelFolder
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError

ENV_FOLDER = "FINETUNE_UPLOAD_PATH"
_STARTS = "starts"
# Starts of this container in a pod: the kubelet starts it again when it was killed.
_MAX_STARTS = 5
_POLL_SECONDS = 0.5
# Pauses before the retries of a request to the storage, about six minutes in all.
_RETRY_DELAYS_SECONDS = (1, 2, 4, 8, 15, *[30] * 11)


def upload(folder: Path) -> None:
    """Claim output.uri, wait for the command to end with 0, and upload.

    Args:
        folder: the folder that the containers share.

    Raises:
        RecipeError: the recipe has no `output.from`.
        RecipeRefusedError: output.uri is another job's or cannot be written, or the command left nothing that can be uploaded.
        TrainingError: the storage failed, or this container was killed again and again.
        SupersededError: a later attempt of the job writes output.uri.
    """
    recipe = JobRecipe.load(os.environ.get(contract.ENV_RECIPE, contract.RECIPE_PATH))
    output = recipe.output
    if output is None or output.from_ is None:
        raise RecipeError("the recipe has no output.from")
    _count_start(folder, output.uri)
    target = ModelFolder(output.uri, recipe.job, read_attempt(), retry_delays_seconds=_RETRY_DELAYS_SECONDS)
    target.claim()
    _write(folder, contract.UPLOAD_CLAIMED)
    print(f"waiting for the command, to upload {output.from_} to {output.uri}", flush=True)
    while not (folder / contract.UPLOAD_REQUESTED).exists():
        time.sleep(_POLL_SECONDS)
    source = Path(output.from_)
    files = list_files(source)
    size_bytes = sum(file.stat().st_size for file in files)
    print(f"uploading {len(files)} files with {size_bytes} bytes to {output.uri}", flush=True)
    target.publish({"": source})
    print(f"uploaded {output.from_} to {output.uri}", flush=True)


def list_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders.

    Raises:
        RecipeRefusedError: there are none, one cannot be read, or one is a link out of the folder, which could lead to the
            credentials of this container.
    """
    root = folder.resolve()
    # NB: without `onerror`, a folder that cannot be read counts as empty.
    walk = os.walk(folder, onerror=_refuse_unreadable)
    files = [path for parent, _, names in walk for name in names if (path := Path(parent) / name).is_file()]
    for path in files:
        if not path.resolve().is_relative_to(root):
            raise RecipeRefusedError(
                f"{path} is a link out of output.from: let your command write a copy of the file",
                reason="OutputUnreadable",
            )
        if not os.access(path, os.R_OK):
            _refuse_unreadable(PermissionError(None, None, str(path)))
    if not files:
        raise RecipeRefusedError(
            f"the command ended with exit code 0 and left no files in output.from {folder}: let it write its result there",
            reason="OutputMissing",
        )
    return files


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise RecipeRefusedError(
        f"the container upload cannot read {error.filename}: let your command make it readable for all users",
        reason="OutputUnreadable",
    ) from error


def _count_start(folder: Path, uri: str) -> None:
    """Count the starts of this container in the pod.

    Raises:
        TrainingError: it was killed too often.
    """
    path = folder / _STARTS
    starts = int(path.read_text(encoding="utf-8")) + 1 if path.exists() else 1
    if starts > _MAX_STARTS:
        raise TrainingError(
            "OutputUploadKilled",
            f"the container upload was killed {_MAX_STARTS} times before the upload to {uri} was complete: kubectl describe pod shows why; "
            "if it ran out of memory, raise the limit of the init container upload in pods.train.template",
        )
    _write(folder, _STARTS, str(starts))


def report(folder: Path, code: int, message: TerminationMessage | None) -> None:
    """Tell the command's container how the upload has ended."""
    if code == contract.EXIT_OK:
        _write(folder, contract.UPLOAD_DONE)
        return
    message = message or TerminationMessage()
    if message.error is not None:
        print(f"{message.error.reason}: {message.error.message}", file=sys.stderr, flush=True)
    failure = RunReport(exit_code=code, message=message)
    _write(folder, contract.UPLOAD_FAILED, failure.model_dump_json(by_alias=True, exclude_none=True))


def _write(folder: Path, name: str, text: str = "") -> None:
    """Write a file that the other container finds complete or not at all."""
    part = folder / f"{name}.{secrets.token_hex(4)}"
    part.write_text(text, encoding="utf-8")
    # The other container may have another user.
    part.chmod(0o644)
    part.rename(folder / name)


def main() -> None:
    """Upload if this pod is the first one, and wait for the end of the pod."""
    library_variables.set_defaults()
    # NB: the kubelet sends SIGTERM when the command's container has ended. Another exit code would look like a failed start of the pod.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(contract.EXIT_OK))
    folder = Path(os.environ.get(ENV_FOLDER, contract.UPLOAD_PATH))
    # A container that was killed after the upload had ended has nothing left to do.
    has_ended = any((folder / name).exists() for name in (contract.UPLOAD_DONE, contract.UPLOAD_FAILED))
    if os.environ.get("NODE_RANK", "0") == "0" and not has_ended:
        exit_status.run(partial(upload, folder), partial(report, folder))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
