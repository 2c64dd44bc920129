"""Which window is open, and when the next one opens: also on the days of the clock change."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from finetune_crds.windows import Window
from finetune_operator.modelpromotion.decide.windows import Opening, find_opening

NEW_YORK = "America/New_York"
HOUR = 3600
NIGHT = {"name": "night", "schedule": "30 1 * * *", "durationSeconds": 1800, "timeZone": NEW_YORK}
LATE = {"name": "late", "schedule": "30 2 * * *", "durationSeconds": 1800, "timeZone": NEW_YORK}
DAYS = {"name": "days", "schedule": "0 9 * * MON-FRI", "durationSeconds": 8 * HOUR}
# Windows, a time, and the next opening; None for a window that is open.
# Clocks in New York: 2026-03-08 02:00 EST -> 03:00 EDT, 2026-11-01 02:00 EDT -> 01:00 EST.
CASES: dict[str, tuple[list[dict[str, Any]], str, tuple[str, str] | None]] = {
    "no windows": ([], "2026-08-01T12:00:00Z", None),
    "at the opening": ([DAYS], "2026-08-03T09:00:00Z", None),
    "just before the end": ([DAYS], "2026-08-03T16:59:59Z", None),
    "at the end": ([DAYS], "2026-08-03T17:00:00Z", ("days", "2026-08-04T09:00:00Z")),
    "over the weekend": ([DAYS], "2026-08-01T12:00:00Z", ("days", "2026-08-03T09:00:00Z")),
    "the earliest of two": ([DAYS, NIGHT], "2026-08-01T12:00:00Z", ("night", "2026-08-02T05:30:00Z")),
    "one of two is open": ([DAYS, NIGHT], "2026-08-02T05:45:00Z", None),
    "windows that overlap": (
        [{"name": "always", "schedule": "0 * * * *", "durationSeconds": 2 * HOUR}],
        "2026-08-01T12:59:59Z",
        None,
    ),
    "a window over midnight": (
        [{"name": "long", "schedule": "0 22 * * SAT", "durationSeconds": 12 * HOUR}],
        "2026-08-02T09:59:59Z",
        None,
    ),
    "a time that does not exist opens nothing": (
        [LATE],
        "2026-03-08T07:00:00Z",
        ("late", "2026-03-09T06:30:00Z"),
    ),
    "a time that exists twice opens once": ([NIGHT], "2026-11-01T05:45:00Z", None),
    "a time that exists twice is closed in between": (
        [NIGHT],
        "2026-11-01T06:15:00Z",
        ("night", "2026-11-01T06:30:00Z"),
    ),
    "a time that exists twice opens twice": ([NIGHT], "2026-11-01T06:45:00Z", None),
    "a duration is counted in seconds, not on the clock": (
        [{"name": "eve", "schedule": "0 0 8 3 *", "durationSeconds": 3 * HOUR, "timeZone": NEW_YORK}],
        "2026-03-08T07:59:59Z",
        None,
    ),
    "it ends an hour later on the clock": (
        [{"name": "eve", "schedule": "0 0 8 3 *", "durationSeconds": 3 * HOUR, "timeZone": NEW_YORK}],
        "2026-03-08T08:00:00Z",
        ("eve", "2027-03-08T05:00:00Z"),
    ),
    "a macro": (
        [{"name": "sunday", "schedule": "@weekly", "durationSeconds": HOUR}],
        "2026-08-01T12:00:00Z",
        ("sunday", "2026-08-02T00:00:00Z"),
    ),
}


@pytest.mark.parametrize(("windows", "now", "expected"), CASES.values(), ids=CASES)
def test_the_next_opening(windows: list[dict[str, Any]], now: str, expected: tuple[str, str] | None) -> None:
    opening = find_opening([Window.model_validate(item) for item in windows], datetime.fromisoformat(now))
    assert opening == (Opening(expected[0], datetime.fromisoformat(expected[1])) if expected else None)
