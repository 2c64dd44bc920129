"""Parse specs and statuses, as far as this version of the operator understands them."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from finetune_crds.base import ApiModel, Json

Part = TypeVar("Part", bound=ApiModel)


class UnreadableStatusError(ValueError):
    """A status that this version of the operator does not understand."""


def read_spec(model: type[Part], body: Json) -> tuple[Part | None, str | None]:
    """The pair (spec, None) or, if the spec does not fit the schema, (None, reason), for example (None, "spec.gates.0.metric: Field required")."""
    try:
        return model.model_validate(body.get("spec") or {}), None
    except ValidationError as error:
        first = error.errors()[0]
        return None, f"{'.'.join(['spec', *(str(part) for part in first['loc'])])}: {first['msg']}"


def read_status(model: type[Part], body: Json, what: str) -> Part:
    """The status of a resource.

    Args:
        what: what the error message calls the resource.

    Raises:
        UnreadableStatusError: another version of the operator, most likely a newer one, wrote the status. This version then does not
            act on the resource, since it could repeat work that the status records.
    """
    try:
        return model.model_validate(body.get("status") or {})
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UnreadableStatusError(
            f"status.{where} was written by another version of the operator, so this version does not act on the "
            f"{what}: reinstall the version that wrote the status"
        ) from error
