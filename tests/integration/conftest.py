"""The fixtures of the integration tier."""

from __future__ import annotations

import pytest

# What the worlds assert is shown as what a test asserts is.
pytest.register_assert_rewrite("worlds")

from worlds.processes.fixtures import *  # noqa: E402, F403 - pytest finds fixtures in a conftest
