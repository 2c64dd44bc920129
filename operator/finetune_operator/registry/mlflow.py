"""MLflow's model registry, with credentials for each call."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from finetune_crds.base import Json
from finetune_operator.mlflow.client import ANONYMOUS, MISSING, Client, Credentials, RefusedError, read_pages
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server, get_run, to_mapping
from finetune_operator.registry.base import (
    ModelVersion,
    RegisteredModel,
    RegisteredVersion,
    find_eval_digest,
    parse_milliseconds,
)
from finetune_operator.text import normalize_address

# NB: MLflow stores versions as 32-bit numbers, and PostgreSQL fails on larger ones.
_MAX_VERSION = 2**31 - 1
_VERSION = re.compile(r"[0-9]{1,10}")
# A run has few versions, and a page of MLflow's answer has hundreds.
_MAX_PAGES = 10


@dataclass(frozen=True)
class MlflowRegistry:
    """The registry of an MLflow server, and the tracking server that has the runs of its versions.

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
        return normalize_address(self.registry_uri)

    def model(self, name: str) -> RegisteredModel | None:
        """A registered model; None when it does not exist."""
        client = self._registry_client
        answer = _call_or_none(partial(client.get, "registered-models/get", name=name))
        if answer is None:
            return None
        with client.parsing_answer():
            model = answer["registered_model"]
            created = parse_milliseconds(model.get("creation_timestamp"))
            return RegisteredModel(name, _parse_aliases(model), created, to_mapping(model.get("tags") or []))

    def version(self, name: str, version: str) -> ModelVersion | None:
        """A version with its tags and the metrics of its run; None when it does not exist."""
        client = self._registry_client
        if int(version) > _MAX_VERSION:
            return None
        answer = _call_or_none(partial(client.get, "model-versions/get", name=name, version=version))
        if answer is None:
            return None
        with client.parsing_answer():
            body = dict(answer["model_version"])
            run_id = str(body.get("run_id") or "") or None
        run = self._get_run(run_id) if run_id else None
        with client.parsing_answer():
            tags = to_mapping(body.get("tags") or [])
            return ModelVersion(
                version=_parse_version(body),
                ready=_is_ready(body),
                run_id=run_id,
                tags=tags,
                metrics={key: _restore_infinity(value) for key, value in run.metrics.items()} if run else {},
                evaluated_on=find_eval_digest(tags, run.tags if run else {}),
                created=parse_milliseconds(body.get("creation_timestamp")),
            )

    def find_version(self, name: str, run_id: str, aliases: Iterable[str]) -> RegisteredVersion | None:
        """The version that a run registered, with its tags, and which of `aliases` point at it.

        Of several versions, the newest; None if the run has no complete version of this name.
        """
        client = self._registry_client
        with client.parsing_answer():
            versions = self._search_versions(name, f"run_id = '{run_id}'")
            if not versions:
                return None
            newest = max(versions, key=lambda item: int(_parse_version(item)))
            version = _parse_version(newest)
            model = client.get("registered-models/get", name=name)["registered_model"]
            holders = _parse_aliases(model)
            pointing = {alias for alias in aliases if holders.get(alias) == version}
            return RegisteredVersion(name, version, frozenset(pointing), to_mapping(newest.get("tags") or []))

    def find_tagged(self, name: str, tag: str, value: str) -> str | None:
        """The first complete version of a model with this tag; None if there is none."""
        with self._registry_client.parsing_answer():
            versions = self._search_versions(name, f"tags.`{tag}` = '{value}'")
            return min(map(_parse_version, versions), key=int, default=None)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, regardless of where it points now."""
        self._registry_client.post("registered-models/alias", name=name, alias=alias, version=version)

    def delete_alias(self, name: str, alias: str) -> None:
        """Remove an alias. Does nothing if it does not exist."""
        client = self._registry_client
        _call_or_none(partial(client.delete, "registered-models/alias", name=name, alias=alias))

    def set_model_tag(self, name: str, key: str, value: str) -> None:
        """Set a tag of a registered model."""
        self._registry_client.post("registered-models/set-tag", name=name, key=key, value=value)

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        client = self._registry_client
        for key, value in tags.items():
            client.post("model-versions/set-tag", name=name, version=version, key=key, value=value)

    def _search_versions(self, name: str, condition: str) -> list[Json]:
        """The complete versions of a model that meet a condition of MLflow's filters."""
        search = partial(self._registry_client.get, "model-versions/search")
        versions = read_pages(search, "model_versions", max_pages=_MAX_PAGES, filter=condition)
        # NB: a model's name may contain quotes, which the filter's grammar cannot express, so the names are compared here.
        return [item for item in versions if item.get("name") == name and _is_ready(item)]

    @property
    def _registry_client(self) -> Client:
        return Client(self.registry_uri, self.credentials)

    def _get_run(self, run_id: str) -> Run | None:
        return get_run(Client(self.tracking_uri, self.credentials), run_id)


def _call_or_none(call: Callable[[], Json]) -> Json | None:
    """The answer to a request; None when MLflow reports that the object does not exist."""
    try:
        return call()
    except RefusedError as error:
        if error.code == MISSING:
            return None
        raise


def _is_ready(version: Json) -> bool:
    """Whether the files of a version are complete."""
    return version.get("status") == "READY"


def _parse_aliases(model: Json) -> dict[str, str]:
    return {str(item["alias"]): _parse_version(item) for item in model.get("aliases") or []}


def _parse_version(item: Json) -> str:
    """The version number in an item of an answer.

    Raises:
        ValueError: the version is not a valid number.
    """
    version = str(item["version"])
    if not _VERSION.fullmatch(version):
        raise ValueError(version)
    return version


def _restore_infinity(value: float) -> float:
    """The metric as it was logged: MLflow's database stores infinity as the largest finite number."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value
