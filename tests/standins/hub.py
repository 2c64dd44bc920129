"""A stand-in for the Hugging Face Hub: data sets and models in memory, over HTTP as its client and `datasets` ask for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from support.http_server import Answer, Request, serving

Json = dict[str, Any]


@dataclass
class Repository:
    """A repository of a data set, or of a model.

    Attributes:
        files: contents by path.
        gated: whether its files need a token; its description does not.
    """

    files: dict[str, bytes]
    gated: bool = False

    @property
    def commit(self) -> str:
        """The commit of main: it changes with the files."""
        return _digest(b"".join(name.encode() + content for name, content in sorted(self.files.items())))


@dataclass
class Hub:
    """Data sets and models by id.

    Attributes:
        token: the one that opens gated repositories.
        requests: method and path of every request.
        away: whether every request fails.
    """

    datasets: dict[str, Repository] = field(default_factory=dict)
    models: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_token"
    requests: list[str] = field(default_factory=list)
    away: bool = False

    def __call__(self, request: Request) -> Answer:
        split = urlsplit(request.target)
        path = unquote(split.path)
        self.requests.append(f"{request.method} {path}")
        if self.away:
            return Answer(503)
        parts = path.strip("/").split("/")
        repositories = {"datasets": self.datasets, "models": self.models}
        if parts[0] == "api" and parts[1:2] and parts[1] in repositories:
            repository = repositories[parts[1]].get("/".join(parts[2:4]))
            return self._api(repository, "/".join(parts[2:4]), parts[4:], request, parse_qs(split.query))
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        if parts[2:3] == ["resolve"]:
            return self._file(
                repositories[kind].get("/".join(parts[:2])), parts[3], "/".join(parts[4:]), request
            )
        return Answer(404)

    def _api(
        self,
        repository: Repository | None,
        name: str,
        parts: list[str],
        request: Request,
        query: dict[str, list[str]],
    ) -> Answer:
        if repository is None:
            return _error(401, "RepoNotFound")
        call, revision = parts[0] if parts else "revision", parts[1] if len(parts) > 1 else "main"
        if call == "auth-check":
            return self._closed(repository, request) or Answer(200, {})
        if revision not in ("main", repository.commit):
            return _error(404, "RevisionNotFound")
        if call == "revision":
            files = [{"rfilename": file} for file in sorted(repository.files)]
            return Answer(200, {"id": name, "sha": repository.commit, "siblings": files})
        if call == "paths-info":
            paths = parse_qs(request.body.decode()).get("paths", [])
            entries = {entry["path"]: entry for entry in _tree(repository, "", recursive=True)}
            return Answer(200, [entries[path] for path in paths if path in entries])
        folder = "/".join(parts[2:])
        listing = _tree(repository, folder, recursive=query.get("recursive") in (["true"], ["True"]))
        return Answer(200, listing) if listing or not folder else _error(404, "EntryNotFound")

    def _file(self, repository: Repository | None, revision: str, path: str, request: Request) -> Answer:
        if repository is None:
            return _error(401, "RepoNotFound")
        if closed := self._closed(repository, request):
            return closed
        if revision not in ("main", repository.commit):
            return _error(404, "RevisionNotFound")
        if path not in repository.files:
            return _error(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
        content = repository.files[path]
        return Answer(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": repository.commit})

    def _closed(self, repository: Repository, request: Request) -> Answer | None:
        """What a request without the token of a gated data set gets."""
        opened = not repository.gated or request.headers["Authorization"] == f"Bearer {self.token}"
        return None if opened else _error(401, "GatedRepo")


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps({"error": code}), {"X-Error-Code": code, **(headers or {})})


def _tree(repository: Repository, folder: str, *, recursive: bool) -> list[Json]:
    """What a folder holds, with what its folders hold on request."""
    entries: dict[str, Json] = {}
    for name, content in sorted(repository.files.items()):
        path = PurePosixPath(name)
        for parent in [*path.parents][-2::-1]:
            entries[str(parent)] = {"type": "directory", "path": str(parent), "oid": _digest(b""), "size": 0}
        entries[name] = {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
    below = {path: entry for path, entry in entries.items() if not folder or path.startswith(f"{folder}/")}
    depth = len(PurePosixPath(folder).parts) + 1
    return [entry for path, entry in below.items() if recursive or len(PurePosixPath(path).parts) == depth]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def running(patch: pytest.MonkeyPatch, folder: Path, datasets: dict[str, Repository]) -> Iterator[Hub]:
    """A Hub with data sets, which the clients in this process talk to; `folder` is their cache."""
    from huggingface_hub import HfFileSystem

    hub = Hub(datasets)
    with serving(hub) as address:
        patch.setattr("huggingface_hub.constants.ENDPOINT", address)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        patch.setattr("datasets.config.HF_ENDPOINT", address)
        patch.setattr(
            "datasets.config.HUB_DATASETS_URL",
            f"{address}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}",
        )
        # NB: the file system remembers what it has listed.
        HfFileSystem.clear_instance_cache()
        yield hub
