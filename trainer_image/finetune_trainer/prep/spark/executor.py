"""`finetune-executor`: the process of one Spark executor, in a pod that the driver creates.

Spark's own images have a script for this; the pyspark wheel has none. Spark describes the executor in the variables that are
read here, and starts the container with the argument `executor`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
# The arguments of _BACKEND, each with the environment variable that contains its value.
_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
# The variables with the options of the JVM, one each, numbered in their order.
_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")


def main() -> int:
    """Replace this process with the JVM of the executor; return an exit code only if a variable is missing."""
    environment = dict(os.environ)
    missing = [name for name in (*_ARGUMENTS.values(), "SPARK_EXECUTOR_MEMORY") if name not in environment]
    if missing:
        print(f"{', '.join(missing)} is not set: only Spark's driver can start this command", file=sys.stderr)
        return 64  # EX_USAGE
    home = find_spark_home()
    environment |= {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    command = build_command(environment, home)
    # NB: Spark unpacks what the driver sends into the working directory, which must not be on the root filesystem: that is read-only.
    os.chdir(tempfile.gettempdir())
    return os.execve(command[0], command, environment)  # noqa: S606 - the JVM takes the place of this process


def find_spark_home() -> Path:
    """Return the folder of the pyspark wheel without importing it, which takes a second."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise RuntimeError("pyspark is not installed")
    return Path(spec.origin).parent


def find_java(environment: Mapping[str, str]) -> str:
    """Return the JVM of JAVA_HOME, or the JVM on the path; /usr/bin/java if there is neither."""
    home = environment.get("JAVA_HOME")
    executable = f"{home}/bin/java" if home else shutil.which("java", path=environment.get("PATH"))
    return executable or "/usr/bin/java"


def build_command(environment: Mapping[str, str], home: Path) -> list[str]:
    """Return the command line of the JVM.

    Args:
        home: folder with Spark's jars in `jars`.
    """
    options = {
        int(match[1]): value for name, value in environment.items() if (match := _OPTION.fullmatch(name))
    }
    classpath = [part for part in (environment.get("SPARK_CLASSPATH"), f"{home}/jars/*") if part]
    arguments = [word for name, variable in _ARGUMENTS.items() for word in (name, environment[variable])]
    return [
        find_java(environment),
        *(options[number] for number in sorted(options)),
        f"-Xmx{environment['SPARK_EXECUTOR_MEMORY']}",
        "-cp",
        ":".join(classpath),
        _BACKEND,
        *arguments,
    ]


if __name__ == "__main__":
    sys.exit(main())
