"""Counts are the same whether they were observed or are made again."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as sf

from finetune_trainer.prep import session
from finetune_trainer.prep.counter import Counter

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.mark.parametrize("again", [False, True])
def test_rows_at_a_place_of_the_plan(spark: SparkSession, again: bool) -> None:
    before, after = Counter("before"), Counter("after")
    numbers = before.watch(spark.range(10, numPartitions=3), odd=sf.count_if(sf.col("id") % 2 == 1))
    kept = after.watch(numbers.where(sf.col("id") < 4))
    assert kept.count() == 4
    assert (before.read(again=again), after.read(again=again)) == ({"all": 10, "odd": 5}, {"all": 4})


def test_counts_that_are_made_again_do_not_follow_from_what_was_observed(spark: SparkSession) -> None:
    counter = Counter("part")
    frame = counter.watch(spark.range(10, numPartitions=5))
    frame.take(1)
    assert counter.read(again=False)["all"] < 10
    assert counter.read(again=True) == {"all": 10}


def test_an_action_without_failures_changes_nothing(spark: SparkSession) -> None:
    before = session.failures(spark)
    assert spark.range(10).count() == 10
    assert session.failures(spark) == before
    assert before is not None


FAILS_ONCE = """
import os, sys
from pyspark.sql import SparkSession
from finetune_trainer.prep import session

def once(rows):
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return list(rows)
    raise RuntimeError("the first time")

spark = SparkSession.builder.master("local[1,2]").config("spark.ui.enabled", False).getOrCreate()
spark.sparkContext.parallelize(range(4), 1).mapPartitions(once).count()
print(session.failures(spark))
"""


def test_a_task_that_fails_runs_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILS_ONCE.replace("sys.argv[1]", repr(str(tmp_path / "ran")))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "1\n", done.stderr


# On Kubernetes, an executor that is disconnected waits for the reason, which comes up to half a minute later.
LOSES_AN_EXECUTOR = """
import operator, os
from pathlib import Path
import pyspark
from pyspark.sql import SparkSession
from finetune_trainer.prep import session

os.environ |= {"SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
cluster = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
spark = cluster.config("spark.ui.enabled", False).getOrCreate()
context = spark.sparkContext
seen = context.accumulator(0)

def watched(number):
    seen.add(1)
    return number % 2, number

sums = context.parallelize(range(100), 4).map(watched).reduceByKey(operator.add)
before = session.failures(spark)
assert sums.count() == 2
print(seen.value, session.failures(spark) - before)

backend = context._jsc.sc().schedulerBackend()
pending = backend.getClass().getSuperclass().getDeclaredField("executorsPendingLossReason")
pending.setAccessible(True)
pending.get(backend).add("0")
reason = getattr(context._jvm.org.apache.spark.scheduler, "LossReasonPending$")
context._jsc.sc().taskScheduler().executorLost("0", getattr(reason, "MODULE$"))
assert sums.map(lambda pair: pair[1]).sum() == sum(range(100))
print(seen.value > 100, session.failures(spark) - before)
spark.stop()
"""


def test_tasks_run_again_for_an_executor_that_was_lost_between_two_stages(tmp_path: Path) -> None:
    """No task and no stage fails, and Spark has not heard yet that the executor is lost."""
    # NB: the workers of such a cluster write to the folder that they begin in.
    done = subprocess.run(
        [sys.executable, "-c", LOSES_AN_EXECUTOR],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["100 0", "True 1"], done.stderr
