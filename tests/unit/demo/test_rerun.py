"""What a second `make demo` keeps of an earlier one."""

from __future__ import annotations

from typing import Any

import pytest

from demo.rerun import Start, find_start

Json = dict[str, Any]

RUNNING: Json = {"status": {"phase": "Training"}}
NEW: Json = {"metadata": {}}
SUCCEEDED: Json = {"status": {"phase": "Succeeded"}}
FAILED: Json = {"status": {"phase": "Failed"}}
PROMOTED: Json = {"spec": {}}
ROLLED_BACK: Json = {"spec": {"rollbackTo": {"type": "Previous"}}}

# The first job, the second one and the promotion champion, and where the demo starts.
EARLIER: dict[str, tuple[Json | None, Json | None, Json | None, Start]] = {
    "nothing": (None, None, None, "first job"),
    "the first job is new": (NEW, None, None, "first job"),
    "the first job runs": (RUNNING, None, None, "first job"),
    "the first job runs beside leftovers": (RUNNING, SUCCEEDED, ROLLED_BACK, "first job"),
    "the first job has failed": (FAILED, None, None, "first job"),
    "the first job has succeeded": (SUCCEEDED, None, None, "first job"),
    "its version is being promoted": (SUCCEEDED, None, PROMOTED, "first job"),
    "the second job runs": (SUCCEEDED, RUNNING, PROMOTED, "second job"),
    "the second job has failed": (SUCCEEDED, FAILED, PROMOTED, "second job"),
    "the second job has succeeded": (SUCCEEDED, SUCCEEDED, PROMOTED, "second job"),
    "the last stage was reached": (SUCCEEDED, SUCCEEDED, ROLLED_BACK, "beginning"),
    "the last stage was reached, and the second job deleted": (SUCCEEDED, None, ROLLED_BACK, "beginning"),
    "the promotions were deleted": (SUCCEEDED, SUCCEEDED, None, "beginning"),
}


@pytest.mark.parametrize(("first", "second", "champion", "start"), EARLIER.values(), ids=EARLIER)
def test_where_the_demo_starts(
    first: Json | None, second: Json | None, champion: Json | None, start: Start
) -> None:
    assert find_start(first, second, champion) == start
