"""Rows of a split in Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.data import Splits
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data import read

if TYPE_CHECKING:
    from pathlib import Path


def test_texts_of_a_dictionary_and_nulls_without_a_type(tmp_path: Path) -> None:
    table = pa.table(
        {"text": pa.array(["a", "b"]).dictionary_encode(), "tools": pa.array([None] * 2, pa.null())}
    )
    pq.write_table(table, tmp_path / "train.parquet")
    splits = Splits(type="Parquet", train=str(tmp_path))
    assert list(read.read(splits, "train", ["text", "tools"], may_be_null=["tools"])) == [
        {"text": ["a", "b"], "tools": [None, None]}
    ]
    with pytest.raises(DataError, match="column tools has rows without a value in "):
        list(read.read(splits, "train", ["text", "tools"]))
