"""Cron schedules of the API, with the syntax of a CronJob."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field


def _build_field(value: str) -> str:
    """Return the pattern of a field of a cron expression: values, ranges and steps, separated by commas."""
    term = f"([*?]|{value}(-{value})?)(/[1-9][0-9]?)?"
    return f"{term}(,{term})*"


_MONTHS = "JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC"
_DAYS = "SUN|MON|TUE|WED|THU|FRI|SAT"
# Minute, hour, day of the month, month, day of the week: the fields that the API server accepts in a CronJob.
_FIELDS = (
    "[0-5]?[0-9]",
    "(2[0-3]|[01]?[0-9])",
    "(3[01]|[12][0-9]|0?[1-9])",
    f"(1[0-2]|0?[1-9]|(?i:{_MONTHS}))",
    f"([0-6]|(?i:{_DAYS}))",
)
_EXPRESSION = " +".join(_build_field(value) for value in _FIELDS)
_MACROS = "yearly|annually|monthly|weekly|daily|midnight|hourly"
SCHEDULE_PATTERN = f"^(@({_MACROS})|{_EXPRESSION})$"
"""Pattern of a schedule."""

Schedule = Annotated[str, Field(max_length=128, pattern=SCHEDULE_PATTERN)]
TimeZone = Annotated[
    str, Field(max_length=64, pattern="^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z][A-Za-z0-9_+-]*)*$")
]
