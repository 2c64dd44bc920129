"""An HTTP server in this process, for stand-ins and proxies: one function answers every request."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        target: path and query as they were sent.
        headers: looked up without regard to case.
    """

    method: str
    target: str
    headers: Message
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What is answered: bytes and text as they are, anything else as JSON."""

    status: int
    body: bytes | str | Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body as it is sent."""
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


class NoAnswerError(Exception):
    """Raised by a function that answers: the connection closes, and the client gets no answer."""


@contextmanager
def serving(
    respond: Callable[[Request], Answer],
    port: int = 0,
    interface: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """A server for the time of a block; yields its address.

    Args:
        respond: called for each request, in a thread of its own; raises NoAnswerError to answer nothing.
        port: a free one unless given.
        interface: address of the one interface on which it answers; the default is the loopback interface.
        tls: with a certificate, for HTTPS.
    """

    class Handler(BaseHTTPRequestHandler):
        # A client keeps its connection; without a delay, since header and body are sent one after the other.
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                answer = respond(Request(self.command, self.path, self.headers, body))
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.content)), **answer.headers}.items():
                    self.send_header(name, value)
                if self.close_connection:
                    # NB: a client that asked for it and is not told so may use the connection again before it sees its end.
                    self.send_header("Connection", "close")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.content)
            except (NoAnswerError, ConnectionError, ssl.SSLEOFError):
                # NB: the last two are a client that has given up.
                self.close_connection = True

        do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer((interface, port), Handler) as server:
        server.daemon_threads = True
        if tls:
            # NB: without the handshake, which would be made by the thread that accepts connections.
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://{interface}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
