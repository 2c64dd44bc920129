"""Which worker runs which files."""

from __future__ import annotations

import pytest

from support.scheduling import SPARK, choose

FILES = ["tests/unit/trainer/test_plan.py", f"{SPARK}test_prep_steps.py", "tests/unit/crds/test_schema.py"]
CHOICES: dict[str, tuple[list[str], bool, str]] = {
    "with Spark": (FILES, True, FILES[1]),
    "without": (FILES, False, FILES[0]),
    "with Spark, when no file of it is left": ([FILES[2]], True, FILES[2]),
    "without, when no other file is left": ([FILES[1]], False, FILES[1]),
}


@pytest.mark.parametrize(("files", "prefers_spark", "expected"), CHOICES.values(), ids=CHOICES)
def test_a_worker_is_given_a_file(files: list[str], prefers_spark: bool, expected: str) -> None:
    assert choose(files, prefers_spark=prefers_spark) == expected
