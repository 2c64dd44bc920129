"""The rules of Unity Catalog for models: names, tags, aliases, and what a version must have before it is READY."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Json = dict[str, Any]
CREATED = 1_782_864_000_000
_NAME = re.compile(r"[^./ ]+\.[^./ ]+\.[^./ ]+")
_FORBIDDEN_IN_TAGS = re.compile(r"[.,\-=/:]")
_MOST_TAGS = 50


class Refusal(Exception):  # noqa: N818
    """An error of Databricks, in its own form."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error_code": code, "message": message}


@dataclass
class Version:
    """A version of a model in Unity Catalog.

    Attributes:
        workspace_id: the workspace of its run; empty when the client did not say.
        metrics: those of the logged model that it was made from.
    """

    run_id: str = ""
    status: str = "READY"
    tags: dict[str, str] = field(default_factory=dict)
    created: int = CREATED
    """Milliseconds since 1970."""
    source: str = ""
    model_id: str = ""
    workspace_id: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def describe(self, name: str, number: int, *, search: bool = False) -> Json:
        """As MLflow's API has it; a search shows no tags."""
        tags = [] if search else [{"key": key, "value": value} for key, value in self.tags.items()]
        metrics = [{"key": key, "value": value} for key, value in self.metrics.items()]
        description = {
            "name": name,
            "version": str(number),
            "run_id": self.run_id,
            "run_tracking_server_id": self.workspace_id,
            "run_workspace_id": self.workspace_id,
            "status": self.status,
            "source": self.source,
            "model_id": self.model_id,
            "creation_timestamp": self.created,
            "storage_location": f"dbfs:/unity/{name}/{number}",
            "tags": tags,
            "model_metrics": metrics,
        }
        return {key: value for key, value in description.items() if value not in ("", [])}


@dataclass
class Model:
    """A model in Unity Catalog."""

    aliases: dict[str, int] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    created: int = CREATED
    """Milliseconds since 1970."""

    def alias(self, alias: str) -> str:
        """The alias as it was first written: upper and lower case are the same."""
        return next((written for written in self.aliases if written.casefold() == alias.casefold()), alias)


def check_name(name: str) -> None:
    """A model has a catalog, a schema and a name.

    Raises:
        Refusal: it has not.
    """
    if not _NAME.fullmatch(name):
        message = f"Invalid model name '{name}'. Please specify all three levels: catalog.schema.model."
        raise Refusal(400, "INVALID_PARAMETER_VALUE", message)


def check_tags(current: dict[str, str], added: dict[str, str]) -> None:
    """The tags of an object of Unity Catalog.

    Raises:
        Refusal: a key or a value is not allowed, or there are too many.
    """
    for key, value in added.items():
        if not key or key != key.strip() or len(key) > 255 or _FORBIDDEN_IN_TAGS.search(key):
            message = f"Tag key '{key}' is not valid: it cannot contain any of . , - = / : nor leading or trailing spaces."
            raise Refusal(400, "INVALID_PARAMETER_VALUE", message)
        if len(value) > 1000:
            raise Refusal(400, "INVALID_PARAMETER_VALUE", f"The value of tag '{key}' is longer than 1000.")
    if len(current | added) > _MOST_TAGS:
        raise Refusal(400, "INVALID_PARAMETER_VALUE", f"An object has at most {_MOST_TAGS} tags.")


def check_files(content: bytes | None) -> None:
    """What was uploaded for a version: a model with a signature that has inputs and outputs.

    Raises:
        Refusal: the version cannot be finalized.
    """
    if content is None:
        raise Refusal(400, "INVALID_PARAMETER_VALUE", "The model version has no MLmodel file.")
    signature = (yaml.safe_load(content) or {}).get("signature") or {}
    if not signature.get("inputs") or not signature.get("outputs"):
        message = "All models in the Unity Catalog must have a signature with both input and output."
        raise Refusal(400, "INVALID_PARAMETER_VALUE", message)
