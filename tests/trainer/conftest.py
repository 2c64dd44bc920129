"""The fixtures of the trainer's tests; kernels that the compiler made are kept for the next run."""

from __future__ import annotations

import os

from support.cache import cache
from support.training import (  # noqa: F401 - pytest finds fixtures in a conftest
    base_model,
    mlflow,
    mlflow_imported,
    mlflow_of_test,
    mlflow_template,
    one_layer,
    pod,
    preferences,
    recipe,
    table,
    teacher,
    trained,
    world,
)

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache() / "inductor"))
