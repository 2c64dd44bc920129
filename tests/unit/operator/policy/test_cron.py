"""Start times, with the rules of a CronJob: also on the days of the clock change."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from finetune_crds.cron import SCHEDULE_PATTERN
from finetune_operator.policy.cron import Cron, CronError

NEW_YORK = "America/New_York"
# Clocks in New York: 2026-03-08 02:00 EST -> 03:00 EDT, 2026-11-01 02:00 EDT -> 01:00 EST.
NEXT: dict[str, tuple[str, str, str, list[str]]] = {
    "each minute": ("* * * * *", "Etc/UTC", "2026-08-01T12:00:30Z", ["2026-08-01T12:01:00Z"]),
    "after the time itself": ("0 12 * * *", "Etc/UTC", "2026-08-01T12:00:00Z", ["2026-08-02T12:00:00Z"]),
    "a macro": ("@weekly", "Etc/UTC", "2026-08-01T12:00:00Z", ["2026-08-02T00:00:00Z"]),
    "a name": ("0 0 * * mon", "Etc/UTC", "2026-08-01T12:00:00Z", ["2026-08-03T00:00:00Z"]),
    "a question mark": ("0 0 ? * 1", "Etc/UTC", "2026-08-01T12:00:00Z", ["2026-08-03T00:00:00Z"]),
    "a step after a value": ("50/5 * * * *", "Etc/UTC", "2026-08-01T12:00:00Z", ["2026-08-01T12:50:00Z"]),
    "either of two days": (
        "0 0 13 * 5",
        "Etc/UTC",
        "2026-08-01T12:00:00Z",
        ["2026-08-07T00:00:00Z", "2026-08-13T00:00:00Z", "2026-08-14T00:00:00Z"],
    ),
    "either of two days, one with steps": (
        "0 0 */10 * 5",
        "Etc/UTC",
        "2026-08-01T12:00:00Z",
        ["2026-08-07T00:00:00Z", "2026-08-11T00:00:00Z", "2026-08-14T00:00:00Z"],
    ),
    "a leap day": ("0 0 29 2 *", "Etc/UTC", "2026-08-01T12:00:00Z", ["2028-02-29T00:00:00Z"]),
    "a zone": ("0 8 * * *", "Asia/Kolkata", "2026-08-01T12:00:00Z", ["2026-08-02T02:30:00Z"]),
    "a time that does not exist is skipped": (
        "30 2 * * *",
        NEW_YORK,
        "2026-03-07T12:00:00Z",
        ["2026-03-09T06:30:00Z", "2026-03-10T06:30:00Z"],
    ),
    "a time that exists twice starts twice": (
        "30 1 * * *",
        NEW_YORK,
        "2026-10-31T12:00:00Z",
        ["2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z", "2026-11-02T06:30:00Z"],
    ),
}


def parse(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(("schedule", "zone", "after", "expected"), NEXT.values(), ids=NEXT)
def test_next_start_times(schedule: str, zone: str, after: str, expected: list[str]) -> None:
    assert re.fullmatch(SCHEDULE_PATTERN, schedule)
    cron, time, found = Cron.parse(schedule, zone), parse(after), []
    for _ in expected:
        time = cron.find_next(time)
        found.append(time.strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert found == expected


@pytest.mark.parametrize(
    ("time", "expected"),
    {
        "the time itself": ("2026-08-01T12:00:00.7Z", "2026-08-01T12:00:00Z"),
        "just before the next": ("2026-08-02T11:59:59Z", "2026-08-01T12:00:00Z"),
    }.values(),
)
def test_last_start_time(time: str, expected: str) -> None:
    assert Cron.parse("0 12 * * *", "Etc/UTC").find_last(parse(time)) == parse(expected)
    assert Cron.parse("0 0 29 2 *", "Etc/UTC").find_last(parse(time)) == parse("2024-02-29T00:00:00Z")


@pytest.mark.parametrize("day", ["2026-03-08", "2026-11-01", "2026-08-01"])
@pytest.mark.parametrize("schedule", ["*/7 * * * *", "30 1,2 * * *", "5 */2 * * *"])
def test_start_times_are_the_minutes_whose_wall_clock_matches(schedule: str, day: str) -> None:
    """The definition of robfig/cron, minute by minute, on the days of the clock change and on a common one."""
    minutes, hours = (_values(field, size) for field, size in zip(schedule.split(), (60, 24), strict=False))
    begin = parse(f"{day}T00:00:00+00:00")
    times = [begin + timedelta(minutes=number) for number in range(1, 36 * 60)]
    walls = [(time, time.astimezone(ZoneInfo(NEW_YORK))) for time in times]
    expected = [time for time, wall in walls if wall.minute in minutes and wall.hour in hours]
    cron, found = Cron.parse(schedule, NEW_YORK), [begin]
    while found[-1] < times[-1]:
        found.append(cron.find_next(found[-1]))
    assert found[1 : len(expected) + 1] == expected
    samples = times[times.index(expected[0]) :: 97]
    assert [cron.find_last(time) for time in samples] == [
        max(start for start in expected if start <= time) for time in samples
    ]


def _values(field: str, size: int) -> list[int]:
    if field.startswith("*"):
        return [*range(0, size, int(field.partition("/")[2] or 1))]
    return [int(part) for part in field.split(",")]


MISTAKES = {
    "an unknown zone": (
        "0 0 * * *",
        "Europe/Berlim",
        "spec.timeZone Europe/Berlim is unknown: set a name of the time zone database, such as Europe/Berlin",
    ),
    "a folder of zones": (
        "0 0 * * *",
        "America",
        "spec.timeZone America is unknown: set a name of the time zone database, such as Europe/Berlin",
    ),
    "a range backwards": ("0 5-2 * * *", "Etc/UTC", "spec.schedule 0 5-2 * * * is not valid: bad hour"),
    "no such day": ("0 0 30 2 *", "Etc/UTC", "spec.schedule 0 0 30 2 * is not valid: bad day-of-month"),
}


@pytest.mark.parametrize(("schedule", "zone", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_that_the_schema_cannot_see(schedule: str, zone: str, message: str) -> None:
    assert re.fullmatch(SCHEDULE_PATTERN, schedule)
    with pytest.raises(CronError) as raised:
        Cron.parse(schedule, zone)
    assert str(raised.value) == message


NO_SCHEDULES = {
    "nothing": "",
    "four fields": "* * * *",
    "six fields": "* * * * * *",
    "a minute that is too large": "60 * * * *",
    "an hour that is too large": "* 24 * * *",
    "no day 0": "* * 0 * *",
    "a month that is too large": "* * * 13 *",
    "a month that is none": "* * * foo *",
    "Sunday as 7": "* * * * 7",
    "the last day": "* * L * *",
    "the second Friday": "* * * * 5#2",
    "no step": "*/0 * * * *",
    "an interval": "@every 5m",
    "a macro in capitals": "@Daily",
    "a zone": "TZ=UTC * * * * *",
}


@pytest.mark.parametrize("schedule", NO_SCHEDULES.values(), ids=NO_SCHEDULES)
def test_the_schema_and_the_parser_refuse(schedule: str) -> None:
    assert re.fullmatch(SCHEDULE_PATTERN, schedule) is None
    with pytest.raises(CronError, match=r"^spec\.windows\[night\]\.schedule .*is not valid: set minute"):
        Cron.parse(schedule, "Etc/UTC", "spec.windows[night]")
