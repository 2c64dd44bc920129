"""The whole table of methods and objectives in BF16 beside FP32, on one rank and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import networks
from support.half import WHOLE_TABLE, differing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_cell_computes_in_bf16_what_it_does_in_fp32(ranks: int, tmp_path: Path) -> None:
    assert differing(WHOLE_TABLE, ranks, tmp_path) == {}
