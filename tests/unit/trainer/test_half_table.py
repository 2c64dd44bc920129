"""The table of passes in half precision leaves nothing out, and its tolerances begin with the rounding of each precision."""

from __future__ import annotations

import pytest
import torch

from support.cells import let_through
from support.half import ROUNDING, WHOLE_TABLE


def test_the_table_is_the_whole_of_what_the_schema_lets_through_on_one_rank_and_on_two() -> None:
    assert len(set(WHOLE_TABLE)) == len(WHOLE_TABLE)
    assert {case.precision for case in WHOLE_TABLE} == {"BF16"}
    cases = {(case.method, case.objective, case.ranks) for case in WHOLE_TABLE if case.objective != "IPO"}
    assert cases == {(*each, ranks) for each in let_through() for ranks in (1, 2)}
    # The other loss of DPO.
    assert {case.ranks for case in WHOLE_TABLE if case.objective == "IPO"} == {1, 2}


@pytest.mark.parametrize(("precision", "dtype"), [("BF16", torch.bfloat16), ("FP16", torch.float16)])
def test_numbers_are_rounded_by_the_share_that_the_tolerances_assume(
    precision: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(1_000_000, generator=generator, dtype=torch.float64).exp2()
    share = exact.to(dtype).double() / exact - 1
    assert share.square().mean().sqrt().item() == pytest.approx(ROUNDING[precision], rel=0.01)
