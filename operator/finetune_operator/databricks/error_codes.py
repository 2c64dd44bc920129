"""The error codes of Databricks, which conditions show, and the log of what a workspace answers."""

from __future__ import annotations

import logging

from finetune_operator.databricks.access import Access
from finetune_operator.text import masked, short

log = logging.getLogger(__name__)

# https://www.rfc-editor.org/rfc/rfc6749#section-5.2 and the errors of Databricks' REST API.
_CODES = frozenset(
    {
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
        "BAD_REQUEST",
        "CANCELLED",
        "CUSTOMER_UNAUTHORIZED",
        "DATA_LOSS",
        "DEADLINE_EXCEEDED",
        "ENDPOINT_NOT_FOUND",
        "FEATURE_DISABLED",
        "INTERNAL_ERROR",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "IO_ERROR",
        "MALFORMED_REQUEST",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "PERMISSION_DENIED",
        "QUOTA_EXCEEDED",
        "REQUEST_LIMIT_EXCEEDED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_CONFLICT",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_EXHAUSTED",
        "RESOURCE_LIMIT_EXCEEDED",
        "TABLE_DOES_NOT_EXIST",
        "TEMPORARILY_UNAVAILABLE",
        "UNAUTHENTICATED",
        "UNKNOWN",
    }
)


def log_reason(access: Access, what: str, text: str) -> None:
    """Log what a workspace answered, without the credentials.

    NB: a user names the workspace, so that no text of an answer may reach a condition or an Event.
    """
    log.warning("Databricks at %s could not %s: %s", access.host, what, short(masked(text, access.secrets)))


def known_code(code: object) -> str:
    """An error code of OAuth or of Databricks; empty for any other text."""
    return code if isinstance(code, str) and code in _CODES else ""
