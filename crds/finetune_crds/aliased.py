"""models:/name@alias: a registered model by one of its aliases."""

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
        """What models:/name@alias names; None for any other URI."""
        match = _ALIASED.fullmatch(uri or "")
        return cls(**match.groupdict()) if match else None
