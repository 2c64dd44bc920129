"""Keeps frames that are read more than once, if the compute supports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pyspark.sql import DataFrame

# Part of the error of compute that keeps no frames.
_REFUSED = "NOT_SUPPORTED_WITH_SERVERLESS"


def keep(frame: DataFrame, kept_frames: ExitStack) -> DataFrame:
    """Return the frame, kept until `kept_frames` closes: on disk, since the size of the frame grows with the corpus.

    NB: serverless compute keeps nothing. The frame is then computed again each time it is read, with the same rows: they depend
    only on the source, and a table is read at one version.
    """
    try:
        persisted = frame.persist(StorageLevel.DISK_ONLY)
    except PySparkException as error:
        if _REFUSED not in (error.getCondition() or str(error)):
            raise
        return frame
    kept_frames.callback(persisted.unpersist)
    return persisted
