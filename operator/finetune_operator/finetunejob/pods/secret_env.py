"""Variables of a container with values from a Secret."""

from __future__ import annotations

from collections.abc import Iterable

from finetune_crds.base import Json


def build_variable(variable: str, secret: str, key: str, *, optional: bool) -> Json:
    """Return a variable with the value of one key. `optional`: without the key, the container starts without the variable."""
    reference = {"name": secret, "key": key, "optional": optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def build_login(secret: str, keys: Iterable[str], *, prefix: str = "") -> list[Json]:
    """Return a variable for each key of a login, of which a Secret has some. `prefix`: before the key in the name of the variable."""
    return [build_variable(f"{prefix}{key}", secret, key, optional=True) for key in keys]
