"""What the two containers of a copy share: the files of the source's version, and a record of its lineage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_RECORD, _FILES = "version.json", "files"


class SourceVersion(BaseModel):
    """The version of the source.

    Attributes:
        model: its registered model.
        version: its number.
        description: its description.
        tags: its tags.
        run_id: the run that created it; None if it names none.
        metrics: newest value of each metric of its run; empty if the run does not exist any more.
        params: the parameters of its run.
        run_tags: the tags of its run.
        files: SHA-256 of each file by its path in the version, in hexadecimal digits.
    """

    # JSON has no NaN and no infinity, which are values of metrics: pydantic would write null.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    model: str
    version: str
    description: str = ""
    tags: dict[str, str]
    run_id: str | None = None
    metrics: dict[str, float]
    params: dict[str, str]
    run_tags: dict[str, str]
    files: dict[str, str]

    def compute_digest(self) -> str:
        """Return the SHA-256 of the paths and contents of all files, as `sha256:<hex>`."""
        return f"sha256:{hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()}"

    def write(self, folder: Path) -> None:
        """Write the record into the shared folder, when all files are there."""
        (folder / _RECORD).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> SourceVersion:
        """Read the record from the shared folder."""
        return cls.model_validate_json((folder / _RECORD).read_text(encoding="utf-8"))


def find_files(folder: Path) -> Path:
    """Return the folder of the version's files in the shared folder."""
    return folder / _FILES


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
