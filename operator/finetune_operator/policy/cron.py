"""Start times of a cron schedule, with the rules of a CronJob.

A CronJob parses its schedule with robfig/cron. cronsim follows the same rules once it gets a field for seconds: without that field,
it imitates the cron daemon of Debian, which moves a start time that does not exist on a day of the clock change.
https://pkg.go.dev/github.com/robfig/cron/v3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from finetune_crds.cron import SCHEDULE_PATTERN

_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
# A schedule that has a start time has one after any time.
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)
# By number of the field: the values of a day of the month, and of a day of the week.
_DAYS = {2: "1-31", 4: "0-6"}
_STEPS = re.compile(r"\*(?=/(?!1\b))")


class CronError(ValueError):
    """A schedule or a time zone is not valid; the message names the field of the spec."""


@dataclass(frozen=True)
class Cron:
    """A parsed schedule.

    Attributes:
        expression: a cron expression that begins with the field for seconds.
    """

    expression: str
    zone: ZoneInfo

    @classmethod
    def parse(cls, schedule: str, time_zone: str, where: str = "spec") -> Cron:
        """Parse a schedule and its time zone.

        Args:
            where: the part of the spec that has the fields `schedule` and `timeZone`, for messages.

        Raises:
            CronError: the time zone is unknown, or the schedule is not valid or has no start times.
        """
        try:
            zone = ZoneInfo(time_zone)
        # NB: for a folder of the time zone database, such as America, zoneinfo raises an OSError.
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise CronError(
                f"{where}.timeZone {time_zone} is unknown: set a name of the time zone database, such as Europe/Berlin"
            ) from error
        if not re.fullmatch(SCHEDULE_PATTERN, schedule):
            raise CronError(
                f"{where}.schedule {schedule} is not valid: set minute, hour, day of the month, month and day of the week as in a "
                "CronJob, such as 0 2 * * MON"
            )
        fields = _MACROS.get(schedule, schedule).replace("?", "*").split()
        # NB: days match either of two restricted fields, and `*` does not restrict. For robfig/cron `*/2` restricts, for cronsim
        # it does not, so that the range is written out.
        fields = [_STEPS.sub(_DAYS[n], item) if n in _DAYS else item for n, item in enumerate(fields)]
        cron = cls(" ".join(["0", *fields]), zone)
        try:
            cron.find_next(_ANY_TIME)
        except CronSimError as error:
            raise CronError(f"{where}.schedule {schedule} is not valid: {str(error).lower()}") from error
        except StopIteration as error:
            raise CronError(f"{where}.schedule {schedule} has no start time") from error
        return cron

    def find_next(self, time: datetime) -> datetime:
        """The first start time after a time.

        NB: it skips a start time in a clock change of half an hour, as in Australia/Lord_Howe, which `find_last` returns.
        """
        return next(CronSim(self.expression, time.astimezone(self.zone))).astimezone(UTC)

    def find_last(self, time: datetime) -> datetime:
        """The last start time that is not after a time."""
        # The iterator begins before its time.
        after = time.replace(microsecond=0) + timedelta(seconds=1)
        return next(CronSim(self.expression, after.astimezone(self.zone), reverse=True)).astimezone(UTC)
