"""Counts are the same whether they were observed or are made again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as sf

from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.counter import Counter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("again", [False, True])
def test_rows_at_a_place_of_the_plan(spark: SparkSession, again: bool) -> None:
    before, after = Counter("before"), Counter("after")
    numbers = before.watch(spark.range(10, numPartitions=3), odd=sf.count_if(sf.col("id") % 2 == 1))
    watched = after.watch(numbers.where(sf.col("id") < 4))
    assert watched.count() == 4
    assert (before.read(again=again), after.read(again=again)) == ({"all": 10, "odd": 5}, {"all": 4})


def test_counts_that_are_made_again_do_not_follow_from_what_was_observed(spark: SparkSession) -> None:
    counter = Counter("part")
    frame = counter.watch(spark.range(10, numPartitions=5))
    frame.take(1)
    assert counter.read(again=False)["all"] < 10
    assert counter.read(again=True) == {"all": 10}


def test_an_action_without_failures_changes_nothing(spark: SparkSession) -> None:
    first_job = session.find_next_job(spark)
    before = session.count_failures(spark, first_job)
    assert spark.range(10).count() == 10
    assert session.count_failures(spark, first_job) == before
    assert before is not None


def test_failed_tasks_and_stages_count(spark: SparkSession) -> None:
    """In a local session, a task that fails is not run again, and its stage fails too. Those of earlier jobs do not count."""

    def fail(_: object) -> int:
        raise RuntimeError("fails")

    first_job = session.find_next_job(spark)
    before = session.count_failures(spark, first_job)
    assert before is not None
    with pytest.raises(Exception, match="fails"):
        spark.sparkContext.parallelize(range(1), 1).map(fail).count()
    assert spark.range(10).count() == 10
    next_job = session.find_next_job(spark)
    assert next_job > first_job + 1
    counts = [session.count_failures(spark, job) for job in (first_job, first_job + 1, next_job)]
    assert counts == [before + 2, before, before]
