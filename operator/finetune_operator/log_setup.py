"""The format and the levels of the operator's log."""

from __future__ import annotations

import logging

import kopf

from finetune_operator.notifications.sender import AUDIT_LOGGER
from finetune_operator.settings import Settings

# NB: kopf's own text format cuts the names of loggers at 20 characters.
_TEXT_FORMAT = "[%(asctime)s] %(name)s [%(levelname)s] %(message)s"


class _RepeatedRequests(logging.Filter):
    """Lowers the level at which kopf logs failed requests that it repeats: only the last failed attempt is an error.

    A failure with status 429, which is usual for a moment after a CRD was installed, becomes INFO. Any other failure that kopf repeats
    becomes WARNING.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno == logging.ERROR and "failed; will retry: " in message:
            record.levelno = logging.INFO if "APITooManyRequestsError" in message else logging.WARNING
            record.levelname = logging.getLevelName(record.levelno)
        # The logger has checked only the original level.
        return record.name == AUDIT_LOGGER or record.levelno >= logging.getLogger().level


def configure_logging(settings: Settings) -> None:
    """Set the format and the levels of all loggers."""
    kopf.configure(
        verbose=settings.log_level == "DEBUG",
        # kopf also accepts a format string, although its annotation does not say so.
        log_format=kopf.LogFormat.JSON if settings.log_format == "json" else _TEXT_FORMAT,  # type: ignore[arg-type]
    )
    logging.getLogger().setLevel(settings.log_level)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_RepeatedRequests())
    for chatty in ("kopf.objects", "aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Lines about moves are written at each level.
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)
