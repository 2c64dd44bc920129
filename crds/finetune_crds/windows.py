"""Windows of a ModelPromotion: the times in which an alias may move."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finetune_crds.base import WEEK_IN_SECONDS, ApiModel, list_type_map
from finetune_crds.cron import TimeZone
from finetune_crds.gates import GateName

# The operator checks the fields of the expression: the pattern of a FineTuneSchedule has a thousand characters.
_FIVE_FIELDS = "^(@[a-z]+|[^ ]+( +[^ ]+){4})$"


class Window(ApiModel):
    """A time in which the alias may move."""

    name: GateName
    """Name of the window."""
    schedule: Annotated[str, Field(max_length=128, pattern=_FIVE_FIELDS)]
    """Opening times as a cron expression. It has the syntax of `schedule` of a FineTuneSchedule."""
    duration_seconds: Annotated[int, Field(ge=60, le=WEEK_IN_SECONDS)]
    """Seconds until the window closes."""
    time_zone: TimeZone = "Etc/UTC"
    """Time zone of the schedule. On a day of the clock change, a time that does not exist opens no window, and one that
    exists twice opens two."""

    @property
    def path(self) -> str:
        """The window in messages about the spec."""
        return f"spec.windows[{self.name}]"


Windows = Annotated[list[Window], Field(max_length=16, json_schema_extra=list_type_map("name"))]
