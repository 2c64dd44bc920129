"""Documents in the columns of a prepared table."""

from __future__ import annotations

from typing import Any

from finetune_crds.data import Columns
from finetune_trainer.examples.token_columns import Document, read_documents, token_columns

PREFERENCE = Columns(type="Preference")


def test_columns_of_a_table_give_the_documents_again() -> None:
    (whole,), pair = (
        token_columns(columns) for columns in (Columns(type="Messages", tools="tools"), PREFERENCE)
    )
    rows: dict[str, list[Any]] = {
        whole.input_ids: [[5], [6, 7]],
        whole.loss_mask: [[True], None],
        pair[0].input_ids: [[1], [2]],
        pair[0].loss_mask: [[False], [True]],
        pair[1].input_ids: [[3], [4]],
        pair[1].loss_mask: [[True], [False]],
    }
    assert list(read_documents(rows, [whole])) == [(Document([5], [True]),), (Document([6, 7], None),)]
    assert list(read_documents(rows, pair)) == [
        (Document([1], [False]), Document([3], [True])),
        (Document([2], [True]), Document([4], [False])),
    ]
