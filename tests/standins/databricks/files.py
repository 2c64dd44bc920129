"""Files of the stand-in workspace: the Files API, and uploads by URLs that were signed for one file."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SIGNED = "/signed/"
_VOLUMES = "/Volumes/"


class FileRefusal(Exception):  # noqa: N818
    """A file cannot be read or written: HTTP status, error code, message."""


@dataclass
class Files:
    """Files by their absolute path in the workspace, such as /Models/main/llm/support/1/MLmodel."""

    folder: Path
    volumes: set[str] = field(default_factory=set)
    """Those that exist, such as /Volumes/main/llm/work. What is not in a volume needs no folder."""
    _signed: dict[str, str] = field(default_factory=dict)

    def write(self, path: str, content: bytes) -> Json:
        """PUT of a file."""
        place = self._place(path)
        self._check_volume(path)
        if not path.startswith(_VOLUMES):
            place.parent.mkdir(parents=True, exist_ok=True)
        elif not place.parent.is_dir():
            raise FileRefusal(404, "NOT_FOUND", f"The directory {path.rpartition('/')[0]} does not exist.")
        place.write_bytes(content)
        return {}

    def make_directory(self, path: str) -> Json:
        """PUT of a folder, and of those above it."""
        self._check_volume(path)
        self._place(path).mkdir(parents=True, exist_ok=True)
        return {}

    def _check_volume(self, path: str) -> None:
        volume = "/".join(path.split("/")[:5])
        if path.startswith(_VOLUMES) and volume not in self.volumes:
            name = volume.removeprefix(_VOLUMES).replace("/", ".")
            raise FileRefusal(404, "NOT_FOUND", f"Volume '{name}' does not exist.")

    def read(self, path: str) -> bytes:
        """GET of a file."""
        place = self._place(path)
        if not place.is_file():
            raise FileRefusal(404, "NOT_FOUND", f"The file {path} does not exist.")
        return place.read_bytes()

    def list(self, path: str) -> Json:
        """GET of a folder, which is there once a file is."""
        place = self._place(path)
        if not place.is_dir():
            raise FileRefusal(404, "NOT_FOUND", f"The directory {path} does not exist.")
        return {
            "contents": [
                {
                    "path": f"{path.rstrip('/')}/{item.name}",
                    "name": item.name,
                    "is_directory": item.is_dir(),
                    "file_size": item.stat().st_size,
                }
                for item in sorted(place.iterdir())
            ]
        }

    def sign(self, uri: str, path: str) -> Json:
        """A URL with which one file can be written or read, without any other credential."""
        token = secrets.token_hex(8)
        self._signed[token] = path
        return {"url": f"{uri}{SIGNED}{token}", "headers": []}

    def signed(self, target: str) -> str:
        """The path that a signed URL is for."""
        path = self._signed.get(target.removeprefix(SIGNED))
        if path is None:
            raise FileRefusal(403, "PERMISSION_DENIED", "The URL was not signed by this workspace.")
        return path

    def _place(self, path: str) -> Path:
        place = (self.folder / path.lstrip("/")).resolve()
        if not place.is_relative_to(self.folder.resolve()):
            raise FileRefusal(400, "INVALID_PARAMETER_VALUE", f"{path} is not a path of the workspace.")
        return place
