"""The whole table of methods and objectives, each cell on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.cells import TABLE, WARNINGS, Cell, Models, check

if TYPE_CHECKING:
    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_what_is_trained_is_what_is_loaded_again(
    *,
    cell: Cell,
    ranks: int,
    pod: Pod,
    models: Models,
    mlflow_of_test: Mlflow,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(replace(cell, ranks=ranks), pod, models, mlflow_of_test, capsys)
