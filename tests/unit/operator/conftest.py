"""A workspace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fixtures.fake_databricks import Workspace, running

# What the fixtures assert is shown as what a test asserts is.
pytest.register_assert_rewrite("fixtures.operator_in_memory", "fixtures.operator_processes")


@pytest.fixture
def databricks() -> Iterator[Workspace]:
    with running() as state:
        yield state
