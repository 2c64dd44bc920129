"""Forks Python workers that have imported what a preparation runs in them: each of them would take two seconds for it.

`spark.python.daemon.module` of the tests' sessions.
"""

from __future__ import annotations

import gc
import os
import sys

# The image of a preparation has no torch either, which takes another two seconds.
sys.modules["torch"] = None  # type: ignore[assignment]
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

import phonenumbers  # noqa: E402, F401
import py3langid  # noqa: E402, F401
import pyspark.worker  # noqa: E402, F401
from pyspark.daemon import manager  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402, F401

from finetune_trainer.prep.expressions import jinja_template  # noqa: E402, F401

if __name__ == "__main__":
    # Each worker collects its garbage after each task.
    gc.freeze()
    manager()
