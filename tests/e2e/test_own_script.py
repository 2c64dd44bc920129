"""A script of the user's own, on HF's Trainer, finds the rendezvous, its parameters and the run in its environment."""

from __future__ import annotations

import re

import yaml

from demo.install import SAMPLES
from e2e.jobs import Jobs


def test_a_script_without_model_and_data_trains_on_both_nodes(jobs: Jobs) -> None:
    text = (SAMPLES / "own-script.yaml").read_text(encoding="utf-8")
    name = jobs.apply(*yaml.safe_load_all(text))
    job = jobs.follow(name)
    # NB: two ranks that print at once may share a line.
    assert sorted(re.findall(r"rank \d of \d on node \d of \d", jobs.logs(name))) == [
        "rank 0 of 2 on node 0 of 2",
        "rank 1 of 2 on node 1 of 2",
    ]
    assert {"model", "data"} & set(job["spec"]) == set()
    # The step and the number of steps are those that HF's Trainer logs to MLflow, and the parameters are numbers.
    progress = job["status"]["progress"]
    assert (progress["step"], progress["maxSteps"], progress["summary"]) == (40, 40, "100%")
    assert progress["loss"] < 1.0
