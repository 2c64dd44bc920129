"""A workspace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from finetune_operator.databricks import workspace
from fixtures.fake_databricks import Workspace, running

# What the fixtures assert is shown as what a test asserts is.
pytest.register_assert_rewrite("fixtures.operator_in_memory")


@pytest.fixture
def databricks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    # NB: the operating system may give the port of an earlier workspace to this one, whose login is cached by its address.
    monkeypatch.setattr(workspace, "_clients", workspace._Clients())
    with running() as state:
        yield state
