"""The fixtures of the trainer's tests."""

from __future__ import annotations

from support.training import *  # noqa: F403 - pytest finds fixtures in a conftest
