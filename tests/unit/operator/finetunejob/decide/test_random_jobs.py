"""Whatever happens to a job, in whatever order: a fixed few sequences of the thousands of `make test-long`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from fixtures.operator_in_memory.decisions import NODES, SOURCE, SPLITS
from fixtures.operator_in_memory.finetunejob_sequences import (
    JOBS,
    STORIES,
    Json,
    Story,
    World,
    check_it_comes_to_its_end,
    told,
    used,
)

QUICK = settings(
    max_examples=35,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


# NB: hypothesis varies its first examples: a few from each of several seeds reach more states than many from one.
@pytest.mark.parametrize("number", [7, 13, 22])
def test_a_job_comes_to_its_end_whatever_happened(number: int) -> None:
    @seed(number)
    @QUICK
    @given(parts=JOBS, story=STORIES)
    def check(parts: Json, story: Story) -> None:
        check_it_comes_to_its_end(told(parts, story))

    check()


PARTS: Json = {
    "distributed": NODES,
    "register": {"model": "m"},
    "evaluation": None,
    "checkpoint": None,
    "runPolicy": {"maxRestarts": 0, "activeDeadlineSeconds": None, "ttlSecondsAfterFinished": None},
}


def test_a_gang_in_the_place_of_another_one_of_its_job_counts() -> None:
    run: tuple[str, Json] = ("pods_run", {"ready": True})
    an_hour: tuple[str, Json] = ("time_passes", {"seconds": 3600})
    vanish: tuple[str, Json] = ("pods_vanish", {"all_of_them": True})
    story = [run, an_hour, vanish, an_hour, run, an_hour]
    world = told(PARTS | {"data": SPLITS}, [(item, ["whole"]) for item in story])
    assert used(world.status) == 2 * 2 * 3600


@pytest.mark.parametrize("evaluation", [{}, None], ids=["evaluated", "not evaluated"])
@pytest.mark.parametrize("data", [SOURCE, SPLITS], ids=["prepared", "given"])
def test_a_job_that_nothing_happens_to_succeeds(data: Json, evaluation: Json | None) -> None:
    world = World(PARTS | {"data": data, "evaluation": evaluation})
    check_it_comes_to_its_end(world)
    assert (world.status.phase, world.status.attempt) == ("Succeeded", 1)
