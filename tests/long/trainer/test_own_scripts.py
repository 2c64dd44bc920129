"""The samples with scripts of other frameworks, each for real: two pods that talk over gloo."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from fixtures.operator_processes.scripts import run_sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.training import Mlflow, Trained


class Script(NamedTuple):
    """What the status of a job says at the end, and what its image has beside what the trainer's has.

    Attributes:
        summary: a percentage where the script tells how many steps there are.
    """

    step: int
    summary: str | None
    packages: tuple[str, ...] = ()


SCRIPTS = {
    "own-script": Script(40, "100%"),
    "own-script-accelerate": Script(64, None),
    # Lightning numbers steps from 0.
    "own-script-lightning": Script(
        63,
        None,
        (
            "lightning==2.6.6",
            "pytorch-lightning==2.6.6",
            "lightning-utilities==0.15.3",
            "torchmetrics==1.9.0",
        ),
    ),
    # NB: it compiles a part of itself, for which this machine needs g++.
    "own-script-deepspeed": Script(
        100,
        "100%",
        (
            "deepspeed==0.19.8",
            "einops==0.8.2",
            "hjson==3.1.0",
            "msgpack==1.2.4",
            "ninja==1.13.2",
            "py-cpuinfo==9.0.0",
        ),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_unchanged_and_its_progress_is_read(
    name: str, tmp_path: Path, mlflow_of_test: Callable[[Trained | None], Mlflow]
) -> None:
    script = SCRIPTS[name]
    packages = installed(tmp_path / "packages", script.packages)
    ended = run_sample(name, tmp_path, mlflow_of_test(None), packages)
    assert ended.codes == [0, 0], "\n".join(ended.output)
    assert ["rank 0 of 2" in ended.output[0], "rank 1 of 2" in ended.output[1]] == [True, True]
    assert ended.progress
    assert (ended.progress.step, ended.progress.summary) == (script.step, script.summary)
    assert ended.progress.loss is not None
    assert ended.progress.loss < 1.0


def installed(folder: Path, packages: tuple[str, ...]) -> Path | None:
    """A folder with packages, without what they require; None for none."""
    if not packages:
        return None
    command = ["uv", "pip", "install", "--python", sys.executable, "--target", str(folder), "--no-deps"]
    subprocess.run([*command, *packages], check=True, capture_output=True)
    return folder
