"""Forks Python workers that have imported what a preparation runs in them: each of them would take two seconds for it.

`spark.python.daemon.module` of the tests' sessions.
"""

from __future__ import annotations

import gc

import phonenumbers  # noqa: F401
import py3langid  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager
from transformers import AutoTokenizer  # noqa: F401

from finetune_trainer.prep.expressions import jinja_template  # noqa: F401

if __name__ == "__main__":
    # Each worker collects its garbage after each task.
    gc.freeze()
    manager()
