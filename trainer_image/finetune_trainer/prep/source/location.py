"""Locations of sources, as Spark reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_SCHEME = "s3a-"
"""The prefix of a scheme of S3 that has credentials of its own: those that Unity Catalog gave for one table. A hash follows,
for example `s3a-1f2e3d4c`."""
S3 = rf"(?:s3a|{OWN_SCHEME}[0-9a-f]{{8}})://"
"""A regular expression for the schemes of S3 in Hadoop: s3a, for files without credentials of their own, and those of OWN_SCHEME."""


def as_named(file: str) -> str:
    """Return the address of a file as a recipe writes it, from Spark's address."""
    return re.sub(S3, "s3://", re.sub(r"^file:/+", "/", file), count=1)


@dataclass(frozen=True)
class Place:
    """A folder or file, with settings of Hadoop's file systems that apply only to reading it."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict)
