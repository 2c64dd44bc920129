"""The jars of Delta and of stores that Spark needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cache import cache

_SCRIPT = Path(__file__).parents[2] / "trainer_image" / "jars.sh"


def jars_folder() -> Path:
    """The folder with the jars, fetched if they are not there."""
    folder = cache() / "jars"
    subprocess.run([_SCRIPT, folder], check=True)
    return folder
