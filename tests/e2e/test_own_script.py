"""A script of the user's own finds the rendezvous, the recipe and the run in its environment."""

from __future__ import annotations

import re

import yaml

from demo.install import SAMPLES
from e2e.jobs import Jobs


def test_every_rank_finds_the_others(jobs: Jobs) -> None:
    text = (SAMPLES / "own-script.yaml").read_text(encoding="utf-8")
    name = jobs.apply(*yaml.safe_load_all(text))
    job = jobs.follow(name)
    # NB: two ranks that print at once may share a line.
    assert sorted(re.findall(r"rank \d of \d on node \d of \d", jobs.logs(name))) == [
        "rank 0 of 4 on node 0 of 2",
        "rank 1 of 4 on node 0 of 2",
        "rank 2 of 4 on node 1 of 2",
        "rank 3 of 4 on node 1 of 2",
    ]
    assert job["status"]["progress"]["step"] == 100
    assert job["status"]["progress"]["loss"] < 0.1
