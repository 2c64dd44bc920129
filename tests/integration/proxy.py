"""A proxy before a server, that fails on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import requests

Failure = Literal["breaks", "is lost", "is done without an answer", "is late"]
"""What becomes of a request: HTTP 500; never forwarded; forwarded, but nobody hears the answer; forwarded when its sender
has given up."""


@dataclass
class Proxy:
    """What the next request to a path meets, and how often that happened."""

    uri: str = ""
    failures: dict[str, Failure] = field(default_factory=dict)
    met: list[str] = field(default_factory=list)
    late_seconds: float = 1.5
    closed: threading.Event = field(default_factory=threading.Event)
    late: threading.Event = field(default_factory=threading.Event)
    """Set when a late request was carried out."""


@contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """A proxy on loopback before the server at `target`."""
    found = Proxy()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].rpartition("/mlflow/")[2]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}

            def forward() -> tuple[int, bytes]:
                answer = requests.request(
                    self.command, target + self.path, data=body, headers=headers, timeout=30
                )
                return answer.status_code, answer.content

            failure = found.failures.pop(f"{self.command} {path}", None)
            if failure:
                found.met.append(f"{path} {failure}")
            self._answer(*_meet(found, failure, forward))

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def _answer(self, code: int, text: bytes) -> None:
            try:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.uri = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.closed.set()
            server.shutdown()
            thread.join()


def _meet(
    found: Proxy, failure: Failure | None, forward: Callable[[], tuple[int, bytes]]
) -> tuple[int, bytes]:
    if failure == "breaks":
        return 500, b"oops"
    if failure == "is late":
        found.closed.wait(found.late_seconds)
        answer = forward()
        found.late.set()
        return answer
    answer = (200, b"{}") if failure == "is lost" else forward()
    if failure:
        found.closed.wait()
    return answer
