"""A workspace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standins.databricks import Workspace, running

# What the worlds assert is shown as what a test asserts is.
pytest.register_assert_rewrite("worlds")


@pytest.fixture
def databricks() -> Iterator[Workspace]:
    with running() as state:
        yield state
