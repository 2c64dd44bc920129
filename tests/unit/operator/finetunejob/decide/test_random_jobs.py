"""Whatever happens to a job, in whatever order: a fixed few sequences of the thousands of `make test-long`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from worlds.memory.decisions import NODES, SOURCE, SPLITS
from worlds.memory.finetunejob_sequences import (
    JOBS,
    STORIES,
    Json,
    Story,
    World,
    check_it_comes_to_its_end,
    told,
)

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


@settings(QUICK, max_examples=300)
@given(parts=JOBS, story=STORIES)
def test_whatever_happens(parts: Json, story: Story) -> None:
    told(parts, story)


@settings(QUICK, max_examples=50)
@given(parts=JOBS, story=STORIES)
def test_a_job_comes_to_its_end_whatever_happened(parts: Json, story: Story) -> None:
    check_it_comes_to_its_end(told(parts, story))


@pytest.mark.parametrize("data", [SOURCE, SPLITS], ids=["prepared", "given"])
def test_a_job_that_nothing_happens_to_succeeds(data: Json) -> None:
    policy = {"maxRestarts": 0, "activeDeadlineSeconds": None, "ttlSecondsAfterFinished": None}
    register = {"model": "m"}
    parts = {
        "data": data,
        "distributed": NODES,
        "register": register,
        "checkpoint": None,
        "runPolicy": policy,
    }
    world = World(parts)
    check_it_comes_to_its_end(world)
    assert (world.status.phase, world.status.attempt) == ("Succeeded", 1)
