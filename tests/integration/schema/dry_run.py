"""What the API server makes of objects, without a namespace for each of them."""

from __future__ import annotations

import uuid
from typing import Any

from support.api import Api

Json = dict[str, Any]
# No operator of the tests watches it.
_NAMESPACE = "default"


def create(api: Api, body: Json, *, strict: bool = False) -> Json:
    """Create an object in a dry run: it is validated and completed with its defaults, but not stored."""
    return api.create(_placed(body), strict=strict, dry_run=True)


def warnings(api: Api, body: Json) -> list[str]:
    """What the API server warns of when an object is created as kubectl does it, in a dry run."""
    return api.warnings(_placed(body))


def change(api: Api, body: Json, spec: Json) -> Json:
    """Store an object, change parts of its spec, and delete it; None removes a part."""
    kind, name = body["kind"], f"changed-{uuid.uuid4().hex[:8]}"
    api.create(_placed(body | {"metadata": {"name": name}}))
    try:
        return api.patch(kind, _NAMESPACE, name, {"spec": spec})
    finally:
        api.delete(kind, _NAMESPACE, name)


def _placed(body: Json) -> Json:
    return {**body, "metadata": {**body["metadata"], "namespace": _NAMESPACE}}
