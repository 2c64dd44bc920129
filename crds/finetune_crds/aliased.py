"""Model URIs with an alias: models:/name@alias."""

from __future__ import annotations

import re
from typing import NamedTuple

_ALIASED = re.compile(r"models:/(?P<model>[^/@]+)@(?P<alias>.+)")


class Aliased(NamedTuple):
    """A registered model and one of its aliases."""

    model: str
    alias: str

    @classmethod
    def parse(cls, uri: str | None) -> Aliased | None:
        """Parse models:/name@alias; None for any other URI."""
        match = _ALIASED.fullmatch(uri or "")
        return cls(**match.groupdict()) if match else None
