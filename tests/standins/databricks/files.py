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
class _Upload:
    """A file that is written in parts."""

    path: str
    overwrite: bool
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Files:
    """Files by their absolute path in the workspace, such as /Models/main/llm/support/1/MLmodel."""

    folder: Path
    volumes: set[str] = field(default_factory=set)
    """Those that exist, such as /Volumes/main/llm/work. What is not in a volume needs no folder."""
    page_size: int = 1000
    """Entries of a folder in one answer, at most."""
    limit: int = 5 * 2**30
    """Bytes of a file that is written in one request, at most."""
    _signed: dict[str, str] = field(default_factory=dict)
    _uploads: dict[str, _Upload] = field(default_factory=dict)

    def write(self, path: str, content: bytes, *, overwrite: bool = True) -> Json:
        """PUT of a file."""
        if len(content) > self.limit:
            raise FileRefusal(
                413, "REQUEST_LIMIT_EXCEEDED", f"The file {path} is larger than {self.limit} bytes."
            )
        return self._write(path, content, overwrite=overwrite)

    def _write(self, path: str, content: bytes, *, overwrite: bool) -> Json:
        place = self._place(path)
        self._check_volume(path)
        if place.is_dir() or (place.exists() and not overwrite):
            raise FileRefusal(409, "ALREADY_EXISTS", f"{path} exists.")
        if not path.startswith(_VOLUMES):
            place.parent.mkdir(parents=True, exist_ok=True)
        else:
            self.directory(path.rpartition("/")[0])
        place.write_bytes(content)
        return {}

    def make_directory(self, path: str) -> Json:
        """PUT of a folder, and of those above it."""
        self._check_volume(path)
        try:
            self._place(path).mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise FileRefusal(
                409, "ALREADY_EXISTS", f"A file is in the place of the directory {path}."
            ) from None
        return {}

    def delete(self, path: str) -> Json:
        """DELETE of a file."""
        self.read(path)
        self._place(path).unlink()
        return {}

    def delete_directory(self, path: str) -> Json:
        """DELETE of an empty folder."""
        place = self.directory(path)
        if any(place.iterdir()):
            raise FileRefusal(400, "DIRECTORY_NOT_EMPTY", f"The directory {path} is not empty.")
        place.rmdir()
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

    def directory(self, path: str) -> Path:
        """HEAD of a folder, which is there once a file is, and a volume is."""
        place = self._place(path)
        if path.rstrip("/") in self.volumes:
            place.mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            raise FileRefusal(404, "NOT_FOUND", f"The directory {path} does not exist.")
        return place

    def list(self, path: str, after: str = "") -> Json:
        """GET of a folder: one page of it, with the token of the next."""
        items = sorted(item for item in self.directory(path).iterdir() if item.name > after)
        contents = [
            {"path": f"{path.rstrip('/')}/{item.name}", "name": item.name, "is_directory": item.is_dir()}
            | ({} if item.is_dir() else {"file_size": item.stat().st_size})
            | {"last_modified": item.stat().st_mtime_ns // 10**6}
            for item in items[: self.page_size]
        ]
        more = {"next_page_token": items[self.page_size - 1].name} if len(items) > self.page_size else {}
        return {"contents": contents, **more}

    def begin(self, path: str, *, overwrite: bool) -> Json:
        """POST that begins a file in parts."""
        self._check_volume(path)
        token = secrets.token_hex(8)
        self._uploads[token] = _Upload(path, overwrite)
        return {"multipart_upload": {"session_token": token}}

    def sign_parts(self, uri: str, body: Json) -> Json:
        """URLs with which parts of a file can be written."""
        first = body["start_part_number"]
        parts = [
            {
                "part_number": number,
                "url": f"{self.sign(uri, body['path'])['url']}?session={body['session_token']}&part={number}",
                "headers": [],
            }
            for number in range(first, first + body["count"])
        ]
        return {"upload_part_urls": parts}

    def write_part(self, session: str, number: int, content: bytes) -> str:
        """PUT of a part; returns its tag."""
        self._uploads[session].parts[number] = content
        return f"tag-{number}"

    def complete(self, session: str, body: Json) -> Json:
        """POST that makes a file of its parts."""
        upload = self._uploads.pop(session)
        part_numbers = [part["part_number"] for part in body["parts"]]
        if part_numbers != sorted(upload.parts) or any(
            part["etag"] != f"tag-{part['part_number']}" for part in body["parts"]
        ):
            raise FileRefusal(
                400, "INVALID_PARAMETER_VALUE", f"The parts of {upload.path} are not those sent."
            )
        return self._write(
            upload.path, b"".join(upload.parts[number] for number in part_numbers), overwrite=upload.overwrite
        )

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
