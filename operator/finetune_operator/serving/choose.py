"""Chooses the backend of an endpoint by `spec.serving.type`. To add a backend, add a package here and an entry in `_BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from finetune_crds.serving import Serving
from finetune_operator.serving.databricks.backend import DatabricksBackend
from finetune_operator.serving.model import ServingBackend

_BACKENDS: Mapping[str, Callable[[Serving], ServingBackend]] = {"Databricks": DatabricksBackend}


def choose_backend(spec: Serving) -> ServingBackend:
    """The backend of the endpoint that a spec describes."""
    return _BACKENDS[spec.type](spec)
