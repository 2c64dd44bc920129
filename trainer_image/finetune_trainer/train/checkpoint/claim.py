"""The claim on a job's checkpoint folder: of all pods of the job, only the newest generation publishes and deletes there."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import SupersededError
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MANIFEST = "claim.json"


@dataclass(frozen=True)
class Holder:
    """The generation that claimed a folder: its attempt, its token, and the time of the claim in UTC."""

    attempt: int
    token: str
    claimed: str

    @classmethod
    def parse(cls, text: bytes) -> Holder | None:
        """Read the holder from the manifest; None if the file has other content."""
        try:
            content = json.loads(text)
            return cls(int(content["attempt"]), str(content["token"]), str(content["claimed"]))
        except (ValueError, KeyError, TypeError):
            return None


def build_token(attempt: int) -> str:
    """Return a new token, which is the name of a folder too."""
    return f"attempt-{attempt}-{secrets.token_hex(4)}"


class Claim:
    """The claim of one generation of pods on a checkpoint folder. A generation is one start of all pods of a job.

    The manifest in the folder names the generation that claimed it last. A lower attempt never takes the folder from a higher
    one. Of two generations of one attempt, for example if Kueue admits a Job again, the later claim counts.

    NB: fsspec's interface cannot replace a file on the condition that it is unchanged, so `confirm` writes the manifest and reads it
    back. Two races remain, and both are harmless:
    - A lower attempt may overwrite the manifest, if it read the manifest before a higher attempt wrote it. The next
      `confirm` of the higher attempt writes the manifest again.
    - A generation may lose the folder right after `confirm`. What it then publishes is a complete checkpoint of the same run,
      in a folder that only this generation writes to (`CheckpointFolder`), and it deletes only what it listed before `confirm`.

    Args:
        folder: URI of the folder.
        attempt: the attempt of this generation.
        token: the token of this generation, the same on all ranks.
    """

    def __init__(self, folder: str, attempt: int, token: str) -> None:
        self.attempt, self.token = attempt, token
        self._folder = folder
        self._has_claimed = False

    def confirm(self) -> None:
        """Claim the folder, or check that no newer generation has claimed it.

        Raises:
            SupersededError: a newer generation has claimed the folder.
            Exception: the storage failed.
        """
        files, path = filesystems.open_filesystem(self._folder)
        holder = _read(files, path)
        if holder is not None and holder.token == self.token:
            return
        self._check_not_newer(holder)
        filesystems.make_folder(files, path)
        holder = Holder(self.attempt, self.token, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
        filesystems.write_atomically(files, f"{path}/{MANIFEST}", json.dumps(asdict(holder)).encode())
        self._has_claimed = True
        # NB: another generation may have written at the same moment.
        self._check_not_newer(_read(files, path))

    def try_to_confirm(self, consequence: str) -> None:
        """Confirm the claim; if the storage fails, print why and what follows.

        Raises:
            SupersededError: a newer generation has claimed the folder.
        """
        with filesystems.tolerate_failures(
            f"the claim on the checkpoint folder {self._folder} cannot be confirmed; {consequence}"
        ):
            self.confirm()

    def _check_not_newer(self, holder: Holder | None) -> None:
        """Raise SupersededError if the holder is a newer generation than this one."""
        if holder is None or holder.token == self.token:
            return
        # Of one attempt, the holder is newer only if it claimed the folder after this generation did.
        has_claimed_later = holder.attempt == self.attempt and self._has_claimed
        if holder.attempt > self.attempt or has_claimed_later:
            raise SupersededError(
                f"newer pods of the job, of attempt {holder.attempt}, claimed the checkpoint folder {self._folder} at {holder.claimed}: these "
                f"pods, of attempt {self.attempt}, publish nothing more and end"
            )


def _read(files: AbstractFileSystem, path: str) -> Holder | None:
    """Return the holder in the manifest; None if there is no readable manifest."""
    try:
        return Holder.parse(files.cat_file(f"{path}/{MANIFEST}"))
    except FileNotFoundError:
        return None
