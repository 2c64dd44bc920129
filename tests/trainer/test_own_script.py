"""A script on Accelerate, unchanged, in two pods. Those of other frameworks run in the long tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fixtures.operator_processes.scripts import run_sample

if TYPE_CHECKING:
    from pathlib import Path

    from support.training import Mlflow


def test_accelerate_finds_the_other_pod_and_its_progress_is_read(
    tmp_path: Path, mlflow_of_test: Mlflow
) -> None:
    ended = run_sample("own-script-accelerate", tmp_path, mlflow_of_test)
    assert ended.codes == [0, 0], "\n".join(ended.output)
    assert ["rank 0 of 2" in ended.output[0], "rank 1 of 2" in ended.output[1]] == [True, True]
    assert ended.progress
    assert ended.progress.step == 64
    assert ended.progress.loss is not None
    assert ended.progress.loss < 1e-3
