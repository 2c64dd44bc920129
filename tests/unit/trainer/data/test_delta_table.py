"""Rows of a split in a Delta table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from finetune_crds.data import Splits
from finetune_trainer.train.data import read

if TYPE_CHECKING:
    from pathlib import Path


def test_a_table_has_columns_that_its_files_lack(tmp_path: Path) -> None:
    """A column that was added later has no value in earlier rows; one that partitions the table is in no file."""
    from deltalake import write_deltalake

    place = str(tmp_path / "table")
    old = pa.table({"split": ["train"] * 2, "text": ["a", "b"], "label": ["yes", "no"]})
    write_deltalake(place, old, partition_by=["label"])
    new = old.append_column("tools", pa.array(["[]", None], pa.string()))
    write_deltalake(place, new, mode="append", schema_mode="merge")
    splits = Splits(type="Delta", path=place, version=1)
    batches = read.read(splits, "train", ["text", "label", "tools"], may_be_null=["tools"])
    rows = [row for batch in batches for row in zip(*batch.values(), strict=True)]
    assert sorted(rows, key=str) == sorted(
        [("a", "yes", None), ("b", "no", None), ("a", "yes", "[]"), ("b", "no", None)], key=str
    )
