"""The fixtures of the operator's long tests."""

from __future__ import annotations

import pytest

# What the fixtures assert is shown as what a test asserts is.
pytest.register_assert_rewrite("fixtures.operator_in_memory", "fixtures.operator_processes")

from fixtures.operator_processes.pytest_fixtures import *  # noqa: E402, F403 - pytest finds fixtures in a conftest
