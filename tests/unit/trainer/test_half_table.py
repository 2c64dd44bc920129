"""The table of passes in half precision leaves nothing out, and its tolerances follow from the precision."""

from __future__ import annotations

import pytest

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from support.cells import let_through
from support.half import GRADIENT, WHOLE_TABLE, tolerance_of_loss


def test_the_table_is_the_whole_of_what_the_schema_lets_through_on_one_rank_and_on_two() -> None:
    assert len(set(WHOLE_TABLE)) == len(WHOLE_TABLE)
    assert {case.precision for case in WHOLE_TABLE} == {"BF16"}
    known = {(case.method, case.objective, case.ranks) for case in WHOLE_TABLE if case.objective != "IPO"}
    assert known == {(*each, ranks) for each in let_through() for ranks in (1, 2)}
    # The other loss of DPO.
    assert {case.ranks for case in WHOLE_TABLE if case.objective == "IPO"} == {1, 2}


@pytest.mark.parametrize("objective", ["SFT", "Distillation", "IPO", *COLUMNS_OF_OBJECTIVE])
def test_three_more_bits_are_an_eighth_of_the_tolerance(objective: str) -> None:
    assert tolerance_of_loss(objective, "BF16") == pytest.approx(8 * tolerance_of_loss(objective, "FP16"))
    assert GRADIENT["BF16"] == pytest.approx(8 * GRADIENT["FP16"])
