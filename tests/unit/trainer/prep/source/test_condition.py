"""The filter is a condition on the columns of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.prep.source import condition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOOD = [
    "language = 'en' AND stars BETWEEN 1 AND 5",
    "try_cast(language AS int) > 1 OR language RLIKE '^[a-z]+$'",
    "exists(tags, tag -> tag = 'java_method') AND size(filter(tags, tag -> tag LIKE 'a%')) > 0",
    "CASE WHEN stars > 3 THEN true ELSE language = '(select 1)' END",
    "from_json(language, 'score int').score > 1 AND to_date(language) > DATE'2020-01-01' - INTERVAL 1 DAY",
    "language COLLATE UTF8_LCASE = 'EN' AND stars IN (1, 2)",
]
FOUND = {
    "stars IN (SELECT 1)": "a subquery",
    "EXISTS (SELECT * FROM parquet.`/etc/passwd`)": "a subquery",
    "stars > (SELECT max(id) FROM range(9))": "a subquery",
    "java_method('java.lang.System', 'getenv', language) IS NULL": "the function java_method",
    "Try_Reflect('java.util.UUID', 'randomUUID') = language": "the function try_reflect",
    "`reflect`('java.util.UUID', 'randomUUID') = language": "the function reflect",
    "spark_catalog.default.score(language) > 1": "the function spark_catalog.default.score",
    "current_user() = language": "the function current_user",
    "session_user = language": "the function current_user",
    "current_catalog() = language": "the function current_catalog",
    "current_date > DATE'2020-01-01'": "the function current_date",
    "unix_timestamp() > stars": "the function current_timestamp",
    "input_file_name() LIKE '%a'": "the function input_file_name",
    "rand(7) > 0.5": "the function rand",
    "uuid() = language OR stars > 1": "the function uuid",
    "spark_partition_id() = 0": "the function spark_partition_id",
    "max(stars) > 1": "an aggregate",
    "row_number() OVER (ORDER BY stars) > 1": "a window",
    "sum(stars) OVER (ORDER BY stars ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) > 1": "a window",
    "stars > :limit": "namedparameter(limit)",
}


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([], "language string, stars int, tags array<string>")


def test_a_condition_on_the_row_passes(frame: DataFrame) -> None:
    for text in GOOD:
        condition.check(frame, text)


def test_what_is_more_than_that_is_refused_by_its_name(frame: DataFrame) -> None:
    messages = {}
    for text in FOUND:
        with pytest.raises(RecipeRefusedError) as refused:
            condition.check(frame, text)
        messages[text] = refused.value.message
    assert messages == {
        text: f"data.prepare.filter `{text}` has {part}, but a filter may only use the columns of one row: remove that part"
        for text, part in FOUND.items()
    }
