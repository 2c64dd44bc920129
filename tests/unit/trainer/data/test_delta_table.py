"""Rows of a split in a Delta table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from finetune_crds.data import Splits
from finetune_trainer.pod.exit_status import DataError, TrainingError
from finetune_trainer.train.data import delta_table, read
from support.http_server import Answer, serving


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


def test_a_store_that_refuses_is_not_a_missing_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The XML of an error begins with its version, and so does the message that quotes it."""
    body = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code></Error>'
    with serving(lambda _request: Answer(403, body)) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "c")):
            monkeypatch.setenv(name, value)
        with pytest.raises(TrainingError) as raised:
            delta_table.open_table(Splits(type="Delta", path="s3://bucket/table", version=3), "train")
    assert raised.value.reason == "DataUnreadable"
    assert raised.value.message.startswith("the Delta table s3://bucket/table cannot be read: ")


def test_a_file_of_a_table_with_text_that_is_not_utf8(tmp_path: Path) -> None:
    """The error names the remedy for a table: a user cannot write a single file of a table again."""
    from deltalake import DeltaTable, write_deltalake

    place = tmp_path / "table"
    write_deltalake(place, pa.table({"split": ["train"], "text": ["é"]}))
    file = Path(*DeltaTable(place).file_uris())
    # Arrow reads the text as it is stored; only its conversion to Python fails.
    file.write_bytes(file.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(DataError) as error:
        list(read.read(Splits(type="Delta", path=str(place)), "train", ["text"]))
    assert error.value.message == (
        f"the split train of {place} cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte): restore the "
        "table"
    )
