"""Reads the YAML files of the platform team. A field that is spelled wrong is a mistake: it must not be dropped without a word."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from finetune_crds.base import first_mistake

Model = TypeVar("Model", bound=BaseModel)


class InstallationFileError(ValueError):
    """A file cannot be read, or is invalid. The message names the file and the field, and quotes no value, which may be a credential."""


def read_bytes(path: str) -> bytes:
    """Return the content of a file.

    Raises:
        InstallationFileError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InstallationFileError(f"{path} cannot be read: {error.strerror}") from error


def load(path: str, model: type[Model]) -> Model:
    """Read a file.

    Raises:
        InstallationFileError: the file cannot be read, is not YAML, or does not fit the model.
    """
    return parse(read_bytes(path), path, model)


def parse(content: bytes, path: str, model: type[Model]) -> Model:
    """Return the document of a file; an empty file is an empty object.

    Raises:
        InstallationFileError: the content is not YAML, or does not fit the model.
    """
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise InstallationFileError(f"{path} is not YAML{where}") from None
    try:
        # NB: a field is spelled as in YAML.
        return model.model_validate(
            {} if document is None else document, extra="forbid", by_alias=True, by_name=False
        )
    except ValidationError as error:
        field, mistake = first_mistake(error)
        raise InstallationFileError(f"{path} is invalid at {field}: {mistake}") from error
