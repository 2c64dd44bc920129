"""The Spark session of a preparation: all of Spark in the prep pod, only its driver there, or the session of a Databricks run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds import spark_conf
from finetune_crds.quantity import jvm_memory
from finetune_trainer.pod.cpus import count_cpus
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from finetune_trainer.prep.spark import kubernetes, metastore, stores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from finetune_crds.catalog import Catalog
    from finetune_crds.spark import Spark

ENV_JARS = "FINETUNE_JARS"
ENV_RUNTIME = "DATABRICKS_RUNTIME_VERSION"
"""Set by Databricks on every kind of its compute."""
DEFAULT_JARS = "/opt/finetune/jars"
# Set by spark-submit for the Python process that it runs.
_ENV_GATEWAY = "PYSPARK_GATEWAY_PORT"
_LOG_LEVEL = "spark.log.level"
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
# NB: G1, the JVM's default, collects garbage concurrently on the same cores: on two cores, 500,000 rows took 131 s with G1
# and 113 s with the serial collector (docs/design/speed.md).
_SERIAL, _FEW_CORES = "-XX:+UseSerialGC", 2
# An option of the JVM that chooses a garbage collector.
_COLLECTOR = re.compile(r"-XX:\+Use\w*GC\b")
# Variables from which the JVM reads options.
_JVM_OPTIONS = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
# Limit for Spark's listeners to receive their events.
_LISTENER_TIMEOUT_MILLISECONDS = 10_000

# NB: these optimizer rules are excluded because they remove empty parts of a plan, and with them the row counts observed there.
# The message about a step that dropped all rows needs these counts.
_EXCLUDED_RULES = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
_EXCLUDED_ADAPTIVE_RULES = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"

# Settings with several values, and the separator of the values: the recipe's values are appended to the defaults.
_JOINED_SETTINGS = {
    "spark.sql.optimizer.excludedRules": ",",
    "spark.sql.adaptive.optimizer.excludedRules": ",",
}
# Settings that spark-submit sets if it created the pod of the driver.
_SUBMITTED_SETTINGS = (
    "spark.app.name",
    "spark.master",
    "spark.driver.memory",
    "spark.driver.host",
    "spark.driver.bindAddress",
    "spark.local.dir",
)
# Settings that the recipe's conf may not have, with the field of the recipe that determines each.
_FIELDS = {
    "spark.master": "data.prepare.spark.mode",
    "spark.driver.memory": "data.prepare.spark.driverMemory",
}


def start(spark: Spark, catalog: Catalog | None = None) -> SparkSession:
    """Start Spark in this pod, on its available cores or as the driver of executors in pods of their own.

    With mode SparkApplication, spark-submit has configured the session.

    Args:
        catalog: the catalog that finds tables by name.

    Raises:
        RecipeRefusedError: the recipe's conf has a setting that is not allowed; or the recipe is for a Databricks run, or for a
            SparkApplication whose driver this pod is not.
        TrainingError: the jars are not in the folder FINETUNE_JARS, or the driver is not allowed to create pods.
    """
    if spark.mode == "Databricks":
        raise RecipeRefusedError(
            "data.prepare.spark.mode Databricks runs in a Databricks workspace, where the operator submits it: use "
            "mode Local here"
        )
    from pyspark.sql import SparkSession

    if spark.mode == "SparkApplication":
        if _ENV_GATEWAY not in os.environ:
            raise RecipeRefusedError(
                "data.prepare.spark.mode SparkApplication runs only in pods that the spark-operator submits: use "
                "mode Local here"
            )
        return SparkSession.builder.getOrCreate()
    driver = _start_driver(spark)
    if _LOG_LEVEL not in spark.conf:
        _silence_query_contexts()
    set_variables(spark)
    session_settings = build_settings(
        spark,
        jars=find_jars(),
        scratch=Path(tempfile.gettempdir()),
        cores=spark.executor_pods * spark.cores_of_executor if driver else count_cpus(),
        environment=os.environ,
        driver=driver,
        catalog=catalog,
    )
    builder = SparkSession.builder
    for name, value in session_settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def set_variables(spark: Spark) -> None:
    """Set the variables that `start` needs; a caller with threads calls this before they start (see `library_variables`)."""
    if spark.mode == "SparkApplication":
        return
    # NB: Python workers inherit this environment through the JVM.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not spark.executor_pods:
        # NB: without this variable, Spark resolves the name of its host, which fails in some networks.
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # NB: this variable would override spark.local.dir.
    os.environ.pop("SPARK_LOCAL_DIRS", None)


def _start_driver(spark: Spark) -> kubernetes.Driver | None:
    """Return the driver of executors in pods, and delete an earlier driver's executors; None if Spark runs in this pod alone."""
    if not spark.executor_pods:
        return None
    driver = kubernetes.Driver.of(os.environ)
    driver.write_template(Path(tempfile.gettempdir()))
    kubernetes.delete_executors(driver.namespace, driver.selector)
    return driver


def _silence_query_contexts() -> None:
    """Keep pyspark from logging each exception about an expression, with its stack: the preparation translates it, or prints it whole."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def on_databricks() -> bool:
    """Whether this process runs on the compute of a Databricks workspace."""
    return ENV_RUNTIME in os.environ


def attach() -> SparkSession:
    """Return the session of the Databricks run, with the settings that the rows and the messages depend on.

    Its jars, size and end are up to Databricks.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    for name, value in (
        ("spark.sql.caseSensitive", "true"),
        ("spark.sql.optimizer.excludedRules", _EXCLUDED_RULES),
        ("spark.sql.adaptive.optimizer.excludedRules", _EXCLUDED_ADAPTIVE_RULES),
    ):
        # Serverless compute does not have these settings; there, the rows are counted in separate actions.
        with contextlib.suppress(PySparkException):
            spark.conf.set(name, value)
    return spark


def context(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session; None on Databricks compute whose Python has no access to the JVM.

    That is serverless compute, and clusters with the access mode Standard.
    """
    from pyspark.errors import PySparkException

    try:
        return spark.sparkContext
    except (PySparkException, AttributeError, NotImplementedError):
        return None


def find_next_job(spark: SparkSession) -> int:
    """Return the number of the job that Spark starts next; 0 if Spark does not report it."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    spark_context = context(spark)
    if spark_context is None:
        return 0
    try:
        number: int = spark_context._jsc.sc().dagScheduler().numTotalJobs()  # noqa: SLF001 - Spark has no public API
    except Py4JError:
        return 0
    return number


def count_failures(spark: SparkSession, first_job: int) -> int | None:
    """Return the number of lost executors, plus the number of failed tasks and stages of jobs from `first_job` on.

    If the number is the same before and after an action, no task of the action ran twice. None if Spark does not report it.

    NB: neither number is sufficient. Stages that miss the results of an executor fail before Kubernetes reports the loss of the executor,
    and an executor that is lost between two stages fails no task.
    """
    from py4j.protocol import Py4JError

    spark_context = context(spark)
    if spark_context is None:
        return None
    try:
        # The status store, which counts the failures, receives its events over this bus.
        spark_context._jsc.sc().listenerBus().waitUntilEmpty(_LISTENER_TIMEOUT_MILLISECONDS)  # noqa: SLF001 - Spark has no public API
        return _count_lost_executors(spark_context) + _count_failed_tasks_and_stages(spark_context, first_job)
    except Py4JError:
        return None


def _count_lost_executors(spark_context: SparkContext) -> int:
    """Return the number of executors that Spark no longer uses.

    NB: the status store does not show this in time, so the scheduler is asked. Spark disables a disconnected executor, and other executors
    recompute its results, but the store is updated when Kubernetes reports the reason: after 30 seconds, if Spark misses the deletion of
    a pod.
    """
    spark = spark_context._jsc.sc()  # noqa: SLF001 - Spark has no public API
    executors = spark.statusStore().executorList(False)
    names = {executors.apply(position).id() for position in range(executors.size())} - {"driver"}
    return sum(not spark.schedulerBackend().isExecutorActive(name) for name in names)


def _count_failed_tasks_and_stages(spark_context: SparkContext, first_job: int) -> int:
    # NB: Spark keeps 1,000 jobs and lists the newest one first. Each number is a call of the JVM, so older jobs are not read.
    job_list = spark_context._jsc.sc().statusStore().jobsList(None)  # noqa: SLF001 - Spark has no public API
    newest_jobs = (job_list.apply(position) for position in range(job_list.size()))
    jobs = takewhile(lambda job: job.jobId() >= first_job, newest_jobs)
    return sum(job.numFailedTasks() + job.numFailedStages() for job in jobs)


def find_jars() -> Path:
    """Return the folder with the jars of Delta and of stores."""
    folder = Path(os.environ.get(ENV_JARS, DEFAULT_JARS))
    if not any(folder.glob("delta-spark_*.jar")):
        raise TrainingError(
            "JarsMissing",
            f"there are no Delta jars in {folder}: run trainer_image/jars.sh and set {ENV_JARS} to its folder",
        )
    return folder


def build_settings(
    spark: Spark,
    *,
    jars: Path,
    scratch: Path,
    cores: int,
    environment: Mapping[str, str],
    driver: kubernetes.Driver | None = None,
    catalog: Catalog | None = None,
) -> dict[str, str]:
    """Return Spark's settings: the product's, then the settings of stores from the environment, then the recipe's conf.

    Args:
        driver: this pod, if it creates executors in pods. None if Spark runs in this pod alone, or if spark-submit made this pod.
        catalog: the catalog that finds tables by name; it changes the settings only if it is a Hive metastore.

    Raises:
        RecipeRefusedError: the conf sets what the recipe has a field for, or what no recipe may set.
    """
    for name, field in _FIELDS.items():
        if name in spark.conf:
            raise RecipeRefusedError(f"data.prepare.spark.conf cannot set {name}: use {field}")
    options = f"-Djava.io.tmpdir={scratch} -Dlog4j2.configurationFile={_LOG_SETTINGS}"
    if not spark.executor_pods and _LOG_LEVEL not in spark.conf:
        # NB: if Spark runs in this pod alone, a failed task fails the job, whose error is reported, so the log of the task is redundant.
        # Executors in pods log their failed tasks, and their driver logs the tasks that are retried.
        options += " -Dfinetune.log.tasks=off"
    if not spark.executor_pods and cores <= _FEW_CORES and not _names_collector(environment):
        options += f" {_SERIAL}"
    defaults = {
        "spark.app.name": "finetune-prep",
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": jvm_memory(spark.driver_memory),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraClassPath": f"{jars}/*",
        "spark.driver.extraJavaOptions": options,
        "spark.local.dir": str(scratch),
        "spark.hadoop.hadoop.tmp.dir": str(scratch / "hadoop"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        _LOG_LEVEL: "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # NB: if true, each call on a column looks up the line of code that made it, which takes ten calls of the JVM.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.shuffle.partitions": str(4 * cores),
        "spark.sql.session.timeZone": "UTC",
        # NB: files may have the columns ID and id. In Hive, names are in lower case, even if the files of the table have other names.
        "spark.sql.caseSensitive": str(not (catalog and catalog.hive)).lower(),
        # NB: for lower(), ICU first computes the title case of every code point in each JVM, which takes 2 to 3 s of CPU time.
        "spark.sql.icu.caseMappings.enabled": "false",
        "spark.sql.optimizer.excludedRules": _EXCLUDED_RULES,
        "spark.sql.adaptive.optimizer.excludedRules": _EXCLUDED_ADAPTIVE_RULES,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # NB: by default, Delta reads the log of each table in 50 tasks, which takes longer for a small log.
        "spark.databricks.delta.snapshotPartitions": "2",
    } | stores.build_settings(environment)
    if catalog and catalog.hive:
        defaults |= metastore.hive_settings(catalog.hive.uri)
    if driver:
        memory = jvm_memory(spark.memory_of_executor)
        defaults |= kubernetes.build_settings(
            spark, driver, jars=jars, scratch=scratch, options=options, memory=memory
        )
    elif spark.executor_pods:
        # spark-submit made this pod.
        defaults = {name: value for name, value in defaults.items() if name not in _SUBMITTED_SETTINGS}
        defaults |= kubernetes.build_executor_settings(spark, jars=jars, options=options)
    if refusal := spark_conf.refusal(spark.conf):
        raise RecipeRefusedError(f"data.prepare.spark.{refusal}")
    joined = {
        name: separator.join((defaults[name], spark.conf[name]))
        for name, separator in _JOINED_SETTINGS.items()
        if name in spark.conf and name in defaults
    }
    return defaults | spark.conf | joined


def _names_collector(environment: Mapping[str, str]) -> bool:
    """Whether the environment names a garbage collector: the JVM does not start with two."""
    return any(_COLLECTOR.search(environment.get(name, "")) for name in _JVM_OPTIONS)


def spark_path(uri: str) -> str:
    """Return a path for Spark: Hadoop's client of S3 has the scheme s3a, the client of Databricks s3."""
    return uri.replace("s3://", "s3a://", 1) if uri.startswith("s3://") and not on_databricks() else uri
