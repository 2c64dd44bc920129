"""The number of a model version in a spec."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

# The number of a version has at most ten digits.
_NUMBER = "[1-9][0-9]{0,9}"
_MAX_NUMBER = 9_999_999_999


def _build_number_schema() -> dict[str, Any]:
    """Return the schema of a version number, which people write with or without quotes."""
    choices = [{"type": "integer"}, {"type": "string"}]
    bounds = {"minimum": 1, "maximum": _MAX_NUMBER, "pattern": f"^{_NUMBER}$"}
    return {"x-kubernetes-int-or-string": True, "anyOf": choices, **bounds}


def _text(value: object) -> object:
    """Return a number as text. Any other value, such as a bool, which is an int in Python, is returned unchanged, for pydantic to check."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


VersionNumber = Annotated[
    str,
    BeforeValidator(_text),
    Field(pattern=f"^{_NUMBER}$", json_schema_extra=_build_number_schema()),
]
"""The number of a model version, as a number or as text."""
