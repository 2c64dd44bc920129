"""MLflow's model registry, with credentials for each call."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from finetune_operator.mlflow.host import ANONYMOUS, Credentials, Host
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server, get_run
from finetune_operator.registry.base import (
    ModelVersion,
    RegisteredModel,
    RegisteredVersion,
    evaluated_on,
    from_milliseconds,
)
from finetune_operator.text import canonical

# NB: databases of MLflow hold versions in 32 bits, and PostgreSQL fails on more.
_LARGEST_VERSION = 2**31 - 1
_MISSING = "RESOURCE_DOES_NOT_EXIST"


@dataclass(frozen=True)
class MlflowRegistry:
    """The registry of an MLflow server, and the tracking server that knows the runs of its versions.

    Every method blocks, and raises ExternalError.
    """

    tracking_uri: str
    registry_uri: str
    credentials: Credentials = ANONYMOUS

    @classmethod
    def of(cls, server: Server) -> Self:
        """The registry that belongs to a tracking server."""
        return cls(server.uri, server.registry_uri, server.credentials)

    @property
    def uri(self) -> str:
        """The normalized name of the registry, equal for all promotions of the same registry."""
        return canonical(self.registry_uri)

    def model(self, name: str) -> RegisteredModel | None:
        """A registered model; None when it does not exist."""
        host = self._registry
        with host.problems():
            found = _unless_missing(lambda: host.registry().get_registered_model(name))
            if found is None:
                return None
            return RegisteredModel(name, _aliases(found), from_milliseconds(found.creation_timestamp))

    def version(self, name: str, version: str) -> ModelVersion | None:
        """A version with its tags and the metrics of its run; None when it does not exist."""
        host = self._registry
        if int(version) > _LARGEST_VERSION:
            return None
        with host.problems():
            found = _unless_missing(lambda: host.registry().get_model_version(name, version))
        if found is None:
            return None
        run = self._run(found.run_id) if found.run_id else None
        tags = dict(found.tags)
        return ModelVersion(
            version=str(found.version),
            ready=found.status == "READY",
            run_id=found.run_id or None,
            tags=tags,
            metrics={
                key: _unclamped(value)
                for key, value in {**(run.metrics if run else {}), **_model_metrics(found)}.items()
            },
            evaluated_on=evaluated_on(tags, run.tags if run else {}),
            created=from_milliseconds(found.creation_timestamp),
        )

    def find_version(self, name: str, run_id: str, aliases: Iterable[str]) -> RegisteredVersion | None:
        """The version that a run registered, the newest if there are several, with its tags, and which of `aliases` point at it."""
        host = self._registry
        with host.problems():
            store = host.registry()
            # NB: a model's name may hold quotes, which the filter's grammar cannot express.
            found = [
                item
                for item in store.search_model_versions(f"run_id = '{run_id}'")
                if item.name == name and item.status == "READY"
            ]
            if not found:
                return None
            newest = max(found, key=lambda item: int(item.version))
            held = _aliases(store.get_registered_model(name))
            pointing = {alias for alias in aliases if held.get(alias) == str(newest.version)}
            tags = dict(newest.tags or {})
            return RegisteredVersion(name, str(newest.version), frozenset(pointing), tags)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, regardless of where it points now."""
        host = self._registry
        with host.problems():
            host.registry().set_registered_model_alias(name, alias, version)

    def delete_alias(self, name: str, alias: str) -> None:
        """Remove an alias. Does nothing if it does not exist."""
        host = self._registry
        with host.problems():
            _unless_missing(lambda: host.registry().delete_registered_model_alias(name, alias))

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        host = self._registry
        with host.problems():
            from mlflow.entities.model_registry import ModelVersionTag

            store = host.registry()
            for key, value in tags.items():
                store.set_model_version_tag(name, version, ModelVersionTag(key, value))

    @property
    def _registry(self) -> Host:
        return Host(self.registry_uri, self.credentials)

    def _run(self, run_id: str) -> Run | None:
        host = Host(self.tracking_uri, self.credentials)
        with host.problems():
            return get_run(host.tracking(), run_id)


def _unless_missing(call: Any) -> Any:
    """The result of a call; None when MLflow reports that the object does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code == _MISSING:
            return None
        raise


def _model_metrics(version: Any) -> dict[str, float]:
    """The metrics of the logged model that a version was made from: those of the latest step."""
    found = sorted(getattr(version, "metrics", None) or [], key=lambda item: item.step or 0)
    return {item.key: item.value for item in found}


def _aliases(model: Any) -> dict[str, str]:
    return {alias: str(version) for alias, version in (getattr(model, "aliases", None) or {}).items()}


def _unclamped(value: float) -> float:
    """The metric as it was logged: MLflow's database stores infinity as the largest finite number."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value
