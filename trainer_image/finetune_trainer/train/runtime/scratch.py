"""The folder that the ranks of a pod share with their launcher: the outcome of each rank, and a training marker."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from finetune_crds.contract import TerminationMessage

ENV_SCRATCH = "FINETUNE_SCRATCH"
PEER_LOST = "PeerLost"
"""The reason of a rank that ended because another rank was lost."""
_TRAINING = "training"


def path() -> Path:
    """Return the folder that the ranks of a pod share; the launcher deletes it at the end."""
    return Path(os.environ[ENV_SCRATCH])


@dataclass(frozen=True)
class RankOutcome:
    """The exit code and message of a rank, and when it wrote them (seconds since the epoch)."""

    code: int
    message: TerminationMessage
    when: float


def write_outcome(folder: Path, rank: int, code: int, message: TerminationMessage | None) -> None:
    """Write the outcome of a rank for the launcher."""
    content = {"code": code, "message": (message or TerminationMessage()).dump()}
    _outcome_path(folder, rank).write_text(json.dumps(content), encoding="utf-8")


def read_outcome(folder: Path, rank: int) -> RankOutcome | None:
    """Return the outcome of a rank; None: it ended without writing one."""
    outcome_path = _outcome_path(folder, rank)
    if not outcome_path.exists():
        return None
    content = json.loads(outcome_path.read_text(encoding="utf-8"))
    return RankOutcome(
        content["code"],
        TerminationMessage.model_validate_json(content["message"]),
        outcome_path.stat().st_mtime,
    )


def _outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def mark_training(folder: Path) -> None:
    """Mark that training starts: from now on a stopped pod loses work."""
    (folder / _TRAINING).touch()


def is_training(folder: Path) -> bool:
    """Whether a rank marked the start of training."""
    return (folder / _TRAINING).exists()
