"""`python -m unit.trainer.prep.faults FOLDER RECIPE [--disks]`: prepares while something fails, in a process of its own.

With --disks, it prepares on disks that are full, and again when they are not, and prints what came of each preparation. It needs a mount
namespace of its own for that: it mounts FOLDER/table, where the tables are to be, and FOLDER/scratch, where Spark puts what it keeps.
Then it prepares the recipe in the file RECIPE, until it is killed.
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

from finetune_crds.recipe import Recipe
from finetune_trainer.pod.exit_status import PodFailure
from support import quick_session
from unit.trainer.prep.recipes import prepared, recipe, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = {"table": "1m", "scratch": "64m"}
ROWS = [{"question": f"What is in hall {number}?", "answer": f"Table {number}."} for number in range(40)]


def mount_disks(folder: Path) -> None:
    for disk, size in SIZES.items():
        (folder / disk).mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder / disk)]
        subprocess.run(mount, check=True)


def fill(disk: Path) -> Path:
    """Fill a disk, and return the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**12))
    return ballast


def prepare_on_disk(spark: SparkSession, folder: Path, tokenizer: str, output: Path) -> list[Any]:
    """The number of rows of the table, or the exit code, the reason and the sentence of the error."""
    job_recipe = recipe(
        source={"type": "Parquet", "path": str(folder / "corpus.parquet")},
        base=tokenizer,
        output=str(output),
        splitRatios={"train": 1, "validation": 0, "test": 0},
    )
    try:
        result = prepared(spark, job_recipe)
    except PodFailure as failure:
        return [failure.exit_code, failure.reason, failure.message]
    return [result.version, len(table_of(result))]


def prepare_on_full_disks(spark: SparkSession, folder: Path, tokenizer: str) -> dict[str, list[Any]]:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "corpus.parquet")
    results: dict[str, list[Any]] = {}
    for disk in SIZES:
        output = folder / "table" / disk
        ballast = fill(folder / disk)
        results[f"{disk} is full"] = prepare_on_disk(spark, folder, tokenizer, output)
        results[f"{disk} was full"] = [path.name for path in output.glob("_delta_log/*.json")]
        ballast.unlink()
        results[f"{disk} has room"] = prepare_on_disk(spark, folder, tokenizer, output)
    return results


def main(folder: Path, job_recipe: Recipe, *, disks: bool) -> None:
    if disks:
        mount_disks(folder)
        tempfile.tempdir = str(folder / "scratch")
    spark = quick_session.start()
    results = prepare_on_full_disks(spark, folder, job_recipe.model.base) if disks else {}
    # NB: the steps of a preparation are printed too.
    (folder / "results.json").write_text(json.dumps(results))
    prepared(spark, job_recipe)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Recipe.load(sys.argv[2]), disks="--disks" in sys.argv)
