"""Tasks that run again, in a small cluster with executors of its own: the preparation learns of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from finetune_trainer.prep.spark import session
from support import spark_jvm

if TYPE_CHECKING:
    from pathlib import Path

# On Kubernetes, an executor that is disconnected waits for the reason, which comes up to half a minute later.
LOSES_A_TASK_AND_AN_EXECUTOR = """
import operator, os
from pathlib import Path
import pyspark
from pyspark.sql import SparkSession
from finetune_trainer.prep.spark import session

os.environ |= {"SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
cluster = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
# The class path of the archive.
cluster = cluster.config("spark.driver.extraClassPath", os.environ["FINETUNE_JARS"] + "/*")
spark = cluster.config("spark.ui.enabled", False).getOrCreate()
context = spark.sparkContext

def fail_once(rows):
    try:
        os.close(os.open("ran", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return list(rows)
    raise RuntimeError("the first time")

context.parallelize(range(4), 1).mapPartitions(fail_once).count()
print(session.count_failures(spark, 0))

seen = context.accumulator(0)

def watched(number):
    seen.add(1)
    return number % 2, number

sums = context.parallelize(range(100), 4).map(watched).reduceByKey(operator.add)
first_job = session.find_next_job(spark)
before = session.count_failures(spark, first_job)
assert sums.count() == 2
print(seen.value, session.count_failures(spark, first_job) - before)

backend = context._jsc.sc().schedulerBackend()
pending = backend.getClass().getSuperclass().getDeclaredField("executorsPendingLossReason")
pending.setAccessible(True)
pending.get(backend).add("0")
reason = getattr(context._jvm.org.apache.spark.scheduler, "LossReasonPending$")
context._jsc.sc().taskScheduler().executorLost("0", getattr(reason, "MODULE$"))
assert sums.map(lambda pair: pair[1]).sum() == sum(range(100))
print(seen.value > 100, session.count_failures(spark, first_job) - before)
spark.stop()
"""


def test_a_task_that_fails_runs_again_and_so_do_those_of_an_executor_that_was_lost_between_two_stages(
    jars: Path,
    tmp_path: Path,
) -> None:
    """For the executor no task and no stage fails, and Spark has not heard yet that it is lost."""
    # NB: the workers of such a cluster write to the folder that they begin in.
    script = LOSES_A_TASK_AND_AN_EXECUTOR.replace('"ran"', repr(str(tmp_path / "ran")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | spark_jvm.build_environment() | {session.ENV_JARS: str(jars)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["1", "100 0", "True 1"], done.stderr
