"""`finetune-prep` on two executors of one core each beside the driver; the arguments are the same.

They are processes of this machine, in Spark's own cluster for tests. Everything else is as in one pod.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from finetune_trainer.prep.__main__ import main as prepare
from finetune_trainer.prep.spark import session

if TYPE_CHECKING:
    from finetune_crds.spark import Spark

EXECUTORS, MEMORY_MIB = 2, 1024
_settings = session.build_settings


def _on_executors(spark: Spark, **place: Any) -> dict[str, str]:
    """The settings of a session in one pod, with executors of one core."""
    ours = _settings(spark, **place)
    memory = f"{MEMORY_MIB}m"
    return ours | {
        "spark.master": f"local-cluster[{EXECUTORS},1,{MEMORY_MIB}]",
        "spark.executor.memory": memory,
        "spark.executor.extraClassPath": ours["spark.driver.extraClassPath"],
        "spark.executor.extraJavaOptions": ours["spark.driver.extraJavaOptions"],
    }


if __name__ == "__main__":
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    session.build_settings = _on_executors
    sys.exit(prepare())
