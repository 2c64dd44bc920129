"""Error codes of Databricks: conditions show only these, and the answer of a workspace goes to the log."""

from __future__ import annotations

import logging

from finetune_crds.masking import mask
from finetune_operator.databricks.access import Access
from finetune_operator.errors import PROTOCOL_CODES
from finetune_operator.text import shorten

log = logging.getLogger(__name__)

# Adds the codes of https://www.rfc-editor.org/rfc/rfc6749#section-5.2 and of Databricks' REST API.
_CODES = PROTOCOL_CODES | {
    "access_denied",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_scope",
    "invalid_target",
    "server_error",
    "temporarily_unavailable",
    "unauthorized_client",
    "unsupported_grant_type",
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "IO_ERROR",
    "MALFORMED_REQUEST",
    "QUOTA_EXCEEDED",
    "TABLE_DOES_NOT_EXIST",
    "UNKNOWN",
}


def log_reason(access: Access, what: str, text: str) -> None:
    """Log what a workspace answered, without the credentials.

    NB: a user names the workspace, which can be any server, so no text of its answers may reach a condition or an Event.

    Args:
        what: the operation that failed, as an infinitive such as "submit a run".
        text: the answer.
    """
    log.warning("Databricks at %s failed to %s: %s", access.host, what, shorten(mask(text, access.secrets)))


def recognize_code(code: object) -> str:
    """An error code of OAuth or of Databricks; empty for any other text."""
    return code if isinstance(code, str) and code in _CODES else ""
