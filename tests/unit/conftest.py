"""Groups of the unit tests, for the workers of pytest-xdist."""

from __future__ import annotations

import pytest

# Fixtures that take long to make, and that a worker makes once.
COSTLY = ("spark", "trained")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share a costly fixture in one worker."""
    for item in items:
        for name in COSTLY:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(name))
