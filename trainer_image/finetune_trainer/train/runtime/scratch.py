"""The folder that the ranks of a pod share with their launcher: how each rank ended, and whether training began."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from finetune_crds.contract import TerminationMessage

ENV_SCRATCH = "FINETUNE_SCRATCH"
PEER_LOST = "PeerLost"
_TRAINING = "training"


def path() -> Path:
    """The folder that the ranks of a pod share, gone when the pod ends."""
    return Path(os.environ[ENV_SCRATCH])


@dataclass(frozen=True)
class Said:
    """How a rank says it ended, and when (seconds since the epoch)."""

    code: int
    message: TerminationMessage
    when: float


def say(folder: Path, rank: int, code: int, message: TerminationMessage | None) -> None:
    """Leave a rank's end for the launcher, in the folder that its pod's ranks share."""
    text = {"code": code, "message": (message or TerminationMessage()).dump()}
    _said_path(folder, rank).write_text(json.dumps(text), encoding="utf-8")


def said(folder: Path, rank: int) -> Said | None:
    """How a rank says it ended; None: it had no time to."""
    path = _said_path(folder, rank)
    if not path.exists():
        return None
    text = json.loads(path.read_text(encoding="utf-8"))
    return Said(text["code"], TerminationMessage.model_validate_json(text["message"]), path.stat().st_mtime)


def _said_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def note_first_step(folder: Path) -> None:
    """Tell the launcher that from now on there is something to lose."""
    (folder / _TRAINING).touch()


def is_training(folder: Path) -> bool:
    """Whether a rank noted its first step."""
    return (folder / _TRAINING).exists()
