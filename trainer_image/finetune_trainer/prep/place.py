"""Where Spark reads a source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_SCHEME = "s3a-"
"""Beginning of the scheme of files that are read with credentials of Unity Catalog."""


@dataclass(frozen=True)
class Place:
    """A folder or file, and settings of Hadoop's file systems for reading it and nothing else."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict)
