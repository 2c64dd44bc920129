"""Text files that are not what their source says, for every reader."""

from __future__ import annotations

BEGINNING_OF_POINTER = "version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS begins. Source: git-lfs, docs/spec.md."""
POINTER = "the file is a Git LFS pointer"
ARRAY = "it begins a JSON array, and JSON lines are objects"
"""Why a line cannot be read."""

_REMEDIES = {
    POINTER: "run git lfs pull, and copy the file again",
    ARRAY: "convert the file with jq -c '.[]'",
}


def find_other_format(line: bytes) -> str | None:
    """Return why a line is not one of JSON lines, if it is the beginning of a well-known other file."""
    if line.startswith(BEGINNING_OF_POINTER.encode()):
        return POINTER
    return ARRAY if line.lstrip().startswith(b"[") else None


def explain(number: int, file: str, reason: str) -> str:
    """Return the sentence for a line that cannot be read, by its number from 1."""
    remedy = _REMEDIES.get(reason, "correct it, or write the file again")
    return f"line {number} of {file} cannot be read ({reason}): {remedy}"
