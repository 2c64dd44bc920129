"""A client of the API server and of MLflow that keeps its connections, so that the benchmark itself costs little."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.certificates import Pair

Json = dict[str, Any]
_TIMEOUT_SECONDS = 60.0
# The benchmark's own requests to MLflow come from this address, by which the access log tells them from the operator's.
WRITER_ADDRESS = "127.0.0.2"


class RequestError(RuntimeError):
    """A server refused a request; the message has its answer."""


@dataclass
class Client:
    """Sends JSON to one server. Each thread has a connection of its own."""

    connect: Callable[[], http.client.HTTPConnection]
    _local: threading.local = field(default_factory=threading.local)

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Json:
        """The answer to a request.

        Raises:
            RequestError: the server refused it.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind, "Accept": "application/json"}
        try:
            status, content = self._send(method, path, data, headers)
        except ConnectionError:
            # NB: a server closes a connection that was not in use for a while: uvicorn after five seconds.
            self._local.connection = None
            status, content = self._send(method, path, data, headers)
        if status >= 300:
            raise RequestError(f"{method} {path}: {status} {content[:500]!r}")
        answer: Json = json.loads(content)
        return answer

    def _send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    def watch(self, path: str) -> Iterator[Json]:
        """The events of a watch, until the server ends it."""
        connection = self.connect()
        connection.request("GET", path)
        with connection.getresponse() as response:
            for line in response:
                event: Json = json.loads(line)
                yield event

    def merge(self, path: str, body: Json) -> Json:
        """Change an object by a merge patch."""
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def items(self, path: str) -> list[Json]:
        """All objects of a list."""
        items: list[Json] = self.call("GET", path)["items"]
        return items

    def count(self, path: str) -> int:
        """The number of objects of a list, without reading them."""
        answer = self.call("GET", f"{path}?limit=1")
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self.connect()
        return connection


def kubernetes_client(server: str, authority: Path, user: Pair) -> Client:
    """A client of an API server with a client certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(user.certificate, user.key)
    host = urlsplit(server).netloc
    return Client(lambda: http.client.HTTPSConnection(host, timeout=_TIMEOUT_SECONDS, context=context))


def mlflow_client(server: str) -> Client:
    """A client of an MLflow server, whose requests come from WRITER_ADDRESS."""
    host = urlsplit(server).netloc
    source = (WRITER_ADDRESS, 0)
    return Client(lambda: http.client.HTTPConnection(host, timeout=_TIMEOUT_SECONDS, source_address=source))
