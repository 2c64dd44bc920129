"""The JVM of Spark in tests, which reads the classes of Spark from an archive (`unit.trainer.prep.class_archive`)."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pyspark

from support.cache import cache

# For runs of seconds: a JVM that compiles quickly, not well.
COMPILES_QUICKLY = "-XX:TieredStopAtLevel=1"
# NB: not in JDK_JAVA_OPTIONS, since the JVM that finds the command line of spark-submit has another class path.
SUBMIT_OPTIONS = "SPARK_SUBMIT_OPTS"


def build_environment(*options: str) -> dict[str, str]:
    """Return the variables of a JVM of tests: it compiles quickly, not well, and reads the archive if there is one."""
    environment = {"JDK_JAVA_OPTIONS": " ".join((COMPILES_QUICKLY, *options))}
    archive = find_archive(cache() / "jars")
    if archive.exists():
        # NB: a JVM with another class path would warn on its output, and read its jars.
        environment[SUBMIT_OPTIONS] = f"-XX:SharedArchiveFile={archive} -Xlog:disable"
    return environment


def find_archive(jars: Path) -> Path:
    """Return the path of the archive for this environment, whose name is that of all that the archive depends on."""
    spark_jars = Path(pyspark.__file__).parent / "jars"
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    digest = hashlib.sha256()
    # NB: the order of a class path with * is that of the folder.
    for file in (
        java.resolve(),
        *(Path(entry) for folder in (jars, spark_jars) for entry in os.scandir(folder)),
    ):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    environment = hashlib.sha256(str(spark_jars).encode()).hexdigest()[:12]
    return cache() / "classes" / environment / f"{digest.hexdigest()[:16]}.jsa"
