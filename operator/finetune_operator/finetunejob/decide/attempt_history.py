"""Records in the status how the last attempts ended, since their pods may no longer exist."""

from __future__ import annotations

from datetime import datetime

from finetune_crds.status import MAX_ATTEMPTS, AttemptCause, EndedAttempt, LastFailure
from finetune_operator.finetunejob.draft.draft import Draft

_MAX_LINES = 20
_MAX_CHARS = 1000


def record_end(
    draft: Draft, failure: LastFailure, cause: AttemptCause, *, end_time: datetime | None = None
) -> None:
    """Append an attempt that failed or was stopped; keep the last entries only. An entry of the same attempt and time is replaced.

    Args:
        end_time: when the attempt had ended; None for now.
    """
    if failure.attempt is None:
        raise ValueError("the failure names no attempt")
    ended = EndedAttempt(
        attempt=failure.attempt,
        end_time=end_time or draft.now,
        cause=cause,
        reason=failure.reason,
        exit_code=failure.exit_code,
        pod=failure.pod,
        node=failure.node,
        checkpoint_step=failure.checkpoint_step,
        message=_keep_last_lines(failure.message or ""),
    )
    key = (ended.attempt, ended.end_time)
    earlier = [item for item in draft.status.attempts or [] if (item.attempt, item.end_time) != key]
    draft.update(attempts=[*earlier, ended][-MAX_ATTEMPTS:])


def _keep_last_lines(message: str) -> str | None:
    """The last lines of a message, cut at the start if they are too long; None for an empty message."""
    lines = message.strip().splitlines()[-_MAX_LINES:]
    text = "\n".join(lines)
    if len(text) > _MAX_CHARS:
        text = f"…{text[-(_MAX_CHARS - 1) :]}"
    return text or None
