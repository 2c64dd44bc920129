"""The origin of a table with one split: the version of a preparation's output, in the metadata of the commit."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NamedTuple

# The key in the metadata of a commit that saved a split.
_SPLIT_OF = "splitOf"


class SplitOrigin(NamedTuple):
    """The split of a version of a preparation's output."""

    path: str
    version: int | None
    split: str

    def to_metadata(self) -> str:
        """Return the metadata of the commit that saves the split."""
        return json.dumps({_SPLIT_OF: self._asdict()})

    @classmethod
    def parse(cls, metadata: str | None) -> SplitOrigin | None:
        """Return the origin in the metadata of a commit; None if the commit saved no split."""
        with suppress(LookupError, ValueError, TypeError):
            origin = json.loads(metadata or "")[_SPLIT_OF]
            version = origin["version"]
            return cls(str(origin["path"]), None if version is None else int(version), str(origin["split"]))
        return None
