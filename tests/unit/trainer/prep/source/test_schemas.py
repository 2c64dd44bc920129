"""Schemas of Parquet files that differ: the type of each column, or the error of types that conflict."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.source.schemas import merge_schemas

INTEGER, LONG, DOUBLE, STRING = IntegerType(), LongType(), DoubleType(), StringType()


def structure(**fields: DataType) -> StructType:
    schema = StructType()
    for name, kind in fields.items():
        schema.add(name, kind)
    return schema


# The schemas of the files a, b and so on, and the merged schema or the beginning of the error.
SCHEMAS: dict[str, tuple[list[StructType], StructType | str]] = {
    "columns that files lack": (
        [structure(m=INTEGER), structure(n=STRING), structure(m=LONG)],
        structure(m=LONG, n=STRING),
    ),
    "fields of lists": (
        [
            structure(m=ArrayType(structure(of=INTEGER))),
            structure(m=ArrayType(structure(of=DOUBLE, to=STRING))),
        ],
        structure(m=ArrayType(structure(of=DOUBLE, to=STRING))),
    ),
    "a conflict": ([structure(m=INTEGER), structure(m=STRING)], "column m holds string in b, and int in a: "),
    "a conflict after a file that lacks the column": (
        [structure(n=INTEGER), structure(m=INTEGER), structure(m=STRING)],
        "column m holds string in c, and int in b: ",
    ),
    "a conflict with a widened type": (
        [structure(m=INTEGER), structure(m=DOUBLE), structure(m=LONG)],
        "column m holds bigint in c, and double in b: ",
    ),
    "a conflict of a field that a file lacks": (
        [
            structure(m=ArrayType(structure(to=INTEGER))),
            structure(m=ArrayType(structure(of=INTEGER))),
            structure(m=ArrayType(structure(of=STRING))),
        ],
        "column m.of holds string in c, and int in b: ",
    ),
    "a conflict of structures and texts": (
        [structure(m=structure(of=INTEGER)), structure(m=structure(to=INTEGER)), structure(m=STRING)],
        "column m holds string in c, and struct<of:int> in a: ",
    ),
    "a conflict of the elements of lists": (
        [structure(m=ArrayType(INTEGER)), structure(m=ArrayType(STRING))],
        "column m holds array<string> in b, and array<int> in a: ",
    ),
}


@pytest.mark.parametrize(("schemas", "expected"), SCHEMAS.values(), ids=SCHEMAS)
def test_merging_schemas(schemas: list[StructType], expected: StructType | str) -> None:
    files = dict(zip("abc", schemas, strict=False))
    if isinstance(expected, StructType):
        assert merge_schemas(files) == expected
        return
    with pytest.raises(DataError) as error:
        merge_schemas(files)
    assert error.value.message == f"{expected}write the column with one type in all files"
