"""Formats times, addresses and error messages of other systems for statuses and logs."""

from __future__ import annotations

import re
from datetime import datetime
from urllib.parse import urlsplit

from finetune_crds.masking import mask_recognized

# From this many minutes on, a duration is shown without seconds, as in kubectl's ages.
_MINUTES_WITH_SECONDS = 10
# Such as [TraceId: 00-1f3a-00] and (Request ID: 1f3a).
_REQUEST_ID = re.compile(r"\s*[\[(](?:trace|req|request|ray)[ _-]?id\b[^\])]{0,200}[\])]", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_USER = re.compile(r"//[^/]*@")


def format_time(when: datetime | None) -> str:
    """A UTC time, to the second, in the format of Kubernetes; empty for None."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""


def format_duration(seconds: int) -> str:
    """A duration in its two largest units, such as 1h20m; seconds are shown only below ten minutes."""
    minutes, rest_seconds = divmod(max(seconds, 0), 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    if days:
        return _join_units(days, "d", hours % 24, "h")
    if hours:
        return _join_units(hours, "h", minutes % 60, "m")
    if minutes >= _MINUTES_WITH_SECONDS:
        return f"{minutes}m"
    return _join_units(minutes, "m", rest_seconds, "s") if minutes else f"{rest_seconds}s"


def _join_units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}" + (f"{small}{small_unit}" if small else "")


def shorten(text: str, limit: int = 300) -> str:
    """The text on one line, without request ids in brackets, truncated to the limit.

    NB: each response has another id. If messages contained these ids, every reconcile would write the status.
    """
    line = _REQUEST_ID.sub("", " ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}..."


def keep_beginning(text: str, limit: int = 8192) -> str:
    """The beginning of a text of another system, of at most `limit` characters, so that no text is too long to be masked and shortened.

    NB: cut between words where there are several: half a credential is no longer recognized.
    """
    if len(text) <= limit:
        return text
    beginning = text[:limit]
    return beginning.rpartition(" ")[0] or beginning


def normalize_address(uri: str) -> str:
    """The http or https address in one spelling, so that equal servers compare equal; other text is only stripped."""
    try:
        parts = urlsplit(uri.strip())
    except ValueError:
        return uri.strip()
    if parts.scheme not in _DEFAULT_PORTS:
        return uri.strip()
    server = parts.netloc.lower().removesuffix(_DEFAULT_PORTS[parts.scheme])
    return f"{parts.scheme}://{server}{parts.path.rstrip('/')}"


def strip_user(uri: str) -> str:
    """An address without user and password, for a message."""
    return _USER.sub("//", uri)


def keep_last_lines(text: str, lines: int = 8, limit: int = 1000) -> str:
    """The last lines of a log without credentials, up to `limit` characters: a Python traceback names its error at the end."""
    # NB: masked before it is cut: half a credential is no longer recognized.
    return "\n".join(mask_recognized(text).strip().splitlines()[-lines:])[-limit:]
