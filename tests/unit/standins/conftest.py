"""A workspace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from standins.databricks import Workspace, running


@pytest.fixture
def databricks() -> Iterator[Workspace]:
    with running() as state:
        state.tracking.open()
        yield state
