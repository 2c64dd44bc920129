"""A server of Git with TLS and logins: git's own `http-backend` behind a server in this process."""

from __future__ import annotations

import base64
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path

from support.http_server import Answer, Request, serving

_IDENTITY = ("-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main")


@dataclass
class GitServer:
    """Repositories in a folder.

    Attributes:
        address: where it answers.
        authority: file with the certificate that it shows.
        logins: user and password by repository; others need none.
        answers: what it answers instead, by path.
        faults: what it answers instead to the next requests.
        asked: the paths that were asked for, each with its Authorization.
        protocol_2: whether it knows version 2 of the protocol.
    """

    folder: Path
    authority: Path
    address: str = ""
    logins: dict[str, tuple[str, str]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    faults: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    protocol_2: bool = True

    def url(self, name: str) -> str:
        """The address of a repository."""
        return f"{self.address}/{name}.git"

    def create(self, name: str) -> None:
        """Make an empty repository."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._git("init", "--quiet", "--bare", f"{name}.git")
        self._git("clone", "--quiet", f"{name}.git", name)

    def commit(self, name: str, files: Mapping[str, str], branch: str = "main", tag: str = "") -> str:
        """Commit files to a branch, push it, and return the commit; an annotated tag may be put on it."""
        work = self.folder / name
        self._git("checkout", "--quiet", "-B", branch, at=work)
        for path, text in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text)
        self._git("add", ".", at=work)
        self._git("commit", "--quiet", "--message", "a change", at=work)
        if tag:
            self._git("tag", "--annotate", tag, "--message", tag, at=work)
        self._git("push", "--quiet", "--force", "--tags", "origin", branch, at=work)
        return self._git("rev-parse", "HEAD", at=work)

    def respond(self, request: Request) -> Answer:
        """Answer one request."""
        path, _, query = request.target.partition("?")
        login = request.headers.get("Authorization")
        self.asked.append((path, login))
        if self.faults:
            return self.faults.pop()
        credentials = self.logins.get(path.split("/")[1].removesuffix(".git"))
        if credentials and login != "Basic " + base64.b64encode(":".join(credentials).encode()).decode():
            return Answer(401, "a secret page", {"WWW-Authenticate": "Basic"})
        if path in self.answers:
            return self.answers[path]
        environment = {
            "GIT_PROJECT_ROOT": str(self.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": request.method,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", "") if self.protocol_2 else "",
        }
        # NB: its exit code is not 0 where it says so in its answer.
        ended = subprocess.run(
            ["git", "-c", "safe.directory=*", "http-backend"],
            input=request.body, env={**os.environ, **environment}, capture_output=True, check=False,
        )  # fmt: skip
        head, _, body = ended.stdout.partition(b"\r\n\r\n")
        headers = dict(message_from_bytes(head).items())
        status = int(headers.pop("Status", "200").split()[0])
        return Answer(status, body, headers)

    def _git(self, *arguments: str, at: Path | None = None) -> str:
        ended = subprocess.run(
            ["git", *_IDENTITY, *arguments], cwd=at or self.folder, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()


@contextmanager
def git_server(folder: Path) -> Iterator[GitServer]:
    """A server for the time of a block, with nothing in it."""
    key, authority = folder / "key.pem", folder / "authority.pem"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "30",
         "-subj", "/CN=git", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(authority)],
        capture_output=True, check=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, key)
    server = GitServer(folder / "repositories", authority)
    with serving(server.respond, tls=context) as address:
        server.address = address
        yield server
