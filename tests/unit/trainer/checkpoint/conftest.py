"""The fixtures of the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from finetune_trainer.train.runtime.distributed import World
from support import networks


@pytest.fixture
def world() -> Iterator[World]:
    """A gang of one, in this process."""
    with networks.alone() as lone_world:
        yield lone_world
