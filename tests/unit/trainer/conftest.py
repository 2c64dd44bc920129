"""The fixtures of the trainer's tests."""

from __future__ import annotations

from support.training import (  # noqa: F401 - pytest finds fixtures in a conftest
    base_model,
    mlflow,
    mlflow_imported,
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
