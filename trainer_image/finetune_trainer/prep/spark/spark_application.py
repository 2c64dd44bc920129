"""`finetune-driver`: the driver of a SparkApplication, in the pod that the spark-operator has submitted.

Spark's own images have a script for this; the pyspark wheel has none. Spark describes the driver in a file of properties, and
starts the container with the argument `driver` and the arguments of spark-submit. What depends on the image is added here: its jars, its
Python, and the settings that the rows depend on. spark-submit then runs the preparation, which uses the session of spark-submit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from finetune_crds.contract import ENV_EXECUTOR_SELECTOR, ENV_POD_NAMESPACE, ENV_RECIPE, RECIPE_PATH
from finetune_crds.recipe import Recipe
from finetune_trainer.pod import exit_status
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.spark import kubernetes, session
from finetune_trainer.prep.spark.executor import find_spark_home

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from finetune_crds.prepare import Prepare

_ROLE = "driver"
# The variable with the address of the driver's pod.
_ADDRESS = "SPARK_DRIVER_BIND_ADDRESS"


def main() -> int:
    """Replace this process with spark-submit; return an exit code only if spark-submit is not started."""
    role, words = sys.argv[1:2], sys.argv[2:]
    missing = [
        name for name in (_ADDRESS, ENV_POD_NAMESPACE, ENV_EXECUTOR_SELECTOR) if name not in os.environ
    ]
    if role != [_ROLE] or missing:
        mistake = f"{', '.join(missing)} is not set" if missing else f"the first argument is not {_ROLE}"
        print(
            f"{mistake}: only the driver's pod of a SparkApplication can start this command", file=sys.stderr
        )
        return 64  # EX_USAGE
    return exit_status.run(partial(_exec_spark_submit, words))


def _exec_spark_submit(words: Sequence[str]) -> NoReturn:
    """Delete the executors of an earlier driver, and replace this process with spark-submit."""
    recipe = Recipe.load(os.environ.get(ENV_RECIPE, RECIPE_PATH))
    prepare = build_request(recipe).prepare
    home = find_spark_home()
    command = build_command(prepare, words, os.environ, home)
    kubernetes.delete_executors(os.environ[ENV_POD_NAMESPACE], os.environ[ENV_EXECUTOR_SELECTOR])
    # NB: the working directory must not be on the root filesystem, which is read-only.
    os.chdir(tempfile.gettempdir())
    os.execve(command[0], command, build_environment(os.environ, home))  # noqa: S606 - the JVM takes the place of this process


def build_command(
    prepare: Prepare, words: Sequence[str], variables: Mapping[str, str], home: Path
) -> list[str]:
    """Return the command line of spark-submit.

    Args:
        words: the arguments of the container after its role: the file of properties, the class and the file to run.
        variables: the environment variables of the pod.
        home: folder with Spark's `bin`.

    Raises:
        RecipeRefusedError: the recipe's conf has a setting that is not allowed.
        TrainingError: the jars are not in the folder FINETUNE_JARS.
    """
    spark = prepare.spark
    session_settings = session.build_settings(
        spark,
        jars=session.find_jars(),
        scratch=Path(tempfile.gettempdir()),
        cores=spark.executor_pods * spark.cores_of_executor,
        environment=variables,
        catalog=prepare.catalog,
    ) | {"spark.driver.bindAddress": variables[_ADDRESS]}
    # NB: these settings override those in the file of properties.
    conf = [word for name, value in session_settings.items() for word in ("--conf", f"{name}={value}")]
    return [str(home / "bin" / "spark-submit"), *conf, "--deploy-mode", "client", *words]


def build_environment(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment variables of spark-submit, and so of the Python processes of the driver."""
    return {
        **variables,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    sys.exit(main())
