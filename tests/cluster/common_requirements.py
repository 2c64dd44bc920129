"""The packages that both images of the trainer need, cut from their lock files: `python -m cluster.common_requirements`."""

from __future__ import annotations

import re

from cluster.paths import REPOSITORY

FOLDER = REPOSITORY / "trainer_image"
COMMON = FOLDER / "requirements.txt"
HEADER = """\
# What requirements-prep.txt and requirements-train.txt have in common, for a layer that both images have.
# This file was written by `make lock`.
"""


def parse_lock(lock: str) -> dict[str, str]:
    """The packages of a lock file, each with its hashes, by `name==version` and the condition for it."""
    entries = re.split(
        r"^(?=[a-z0-9])", re.sub(r"^ *#.*\n", "", lock, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return {entry.splitlines()[0].rstrip("\\ "): entry for entry in entries if entry.strip()}


def render_common() -> str:
    """The lock file of the packages that both images need at the same version, under the same condition."""
    prep, train = (
        parse_lock((FOLDER / f"requirements-{name}.txt").read_text()) for name in ("prep", "train")
    )
    return HEADER + "".join(entry for name, entry in prep.items() if train.get(name) == entry)


if __name__ == "__main__":
    COMMON.write_text(render_common())
