"""A workspace for each test, and loggers as they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from finetune_operator.databricks import workspace
from finetune_operator.notifications.sender import AUDIT_LOGGER
from fixtures.fake_databricks import Workspace, running

# What the fixtures assert is shown as what a test asserts is.
pytest.register_assert_rewrite("fixtures.operator_in_memory")
CHATTY = ("kopf.objects", "aiohttp.access", "urllib3")


@pytest.fixture
def databricks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    # NB: the operating system may give the port of an earlier workspace to this one, whose login is cached by its address.
    monkeypatch.setattr(workspace, "_clients", workspace._Clients())
    with running() as state:
        yield state


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """Put the handlers and levels of the loggers back."""
    root, asyncio_logger = logging.getLogger(), logging.getLogger("asyncio")
    handlers, asyncio_handlers = root.handlers[:], asyncio_logger.handlers[:]
    levels = {name: logging.getLogger(name).level for name in (None, AUDIT_LOGGER, *CHATTY)}
    propagates = asyncio_logger.propagate
    yield
    root.handlers[:], asyncio_logger.handlers[:] = handlers, asyncio_handlers
    asyncio_logger.propagate = propagates
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
