"""`python -m unit.trainer.prep.full_disk FOLDER TOKENIZER`: prepares on disks that are full, and again when they are not.

A process in a mount namespace of its own, where it may mount file systems: FOLDER/table, where the table is to be, and
FOLDER/scratch, where Spark puts what it keeps. It prints what came of each preparation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from finetune_crds.spark import Spark
from finetune_trainer.outcome import PodFailure
from finetune_trainer.prep import session
from unit.trainer.prep.recipes import INTERPRETED, QUICK, prepared, recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

SIZES = {"table": "1m", "scratch": "64m"}
ROWS = [{"question": f"What is in hall {number}?", "answer": f"Table {number}."} for number in range(2000)]


def filled(disk: Path) -> Path:
    """Fill a disk, and return the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**12))
    return ballast


def outcome(spark: SparkSession, folder: Path, tokenizer: Path, output: Path) -> list[Any]:
    """The number of rows of the table, or the exit code, the reason and the sentence of the error."""
    asked = recipe(
        source={"type": "Parquet", "path": str(folder / "corpus.parquet")},
        base=str(tokenizer),
        output=str(output),
        splitRatios={"train": 1, "validation": 0, "test": 0},
    )
    try:
        made = prepared(spark, asked)
    except PodFailure as failure:
        return [failure.exit_code, failure.reason, failure.message]
    return [made.version, len(table_of(made))]


def found(spark: SparkSession, folder: Path, tokenizer: Path) -> Iterator[tuple[str, list[Any]]]:
    for disk in SIZES:
        output = folder / "table" / disk
        ballast = filled(folder / disk)
        yield f"{disk} is full", outcome(spark, folder, tokenizer, output)
        yield f"{disk} was full", [path.name for path in output.glob("_delta_log/*.json")]
        ballast.unlink()
        yield f"{disk} has room", outcome(spark, folder, tokenizer, output)


def main(folder: Path, tokenizer: Path) -> None:
    for disk, size in SIZES.items():
        (folder / disk).mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder / disk)]
        subprocess.run(mount, check=True)
    tempfile.tempdir = str(folder / "scratch")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "corpus.parquet")
    spark = session.start(Spark(driver_memory="1Gi", conf=QUICK))
    for name, value in INTERPRETED.items():
        spark.conf.set(name, value)
    print(json.dumps(dict(found(spark, folder, tokenizer))), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
