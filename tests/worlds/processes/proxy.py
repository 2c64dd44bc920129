"""A proxy before a server, that fails on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import requests

from support.http_server import Answer, NoAnswerError, Request, serving

Failure = Literal["breaks", "is lost", "is done without an answer", "is late"]
"""What becomes of a request: HTTP 500; never forwarded; forwarded, but the response is lost; forwarded when its sender
has lost the connection."""


@dataclass
class Proxy:
    """What the next request to a path meets, and how often that happened."""

    uri: str = ""
    failures: dict[str, Failure] = field(default_factory=dict)
    met: list[str] = field(default_factory=list)
    late_seconds: float = 2
    late: threading.Event = field(default_factory=threading.Event)
    """Set when a late request was carried out."""


@contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """A proxy on loopback before the server at `target`."""
    relay = Proxy()

    def respond(request: Request) -> Answer:
        path = request.target.partition("?")[0].rpartition("/mlflow/")[2]
        failure = relay.failures.pop(f"{request.method} {path}", None)
        if failure:
            relay.met.append(f"{path} {failure}")
        return _meet(relay, failure, lambda: _forward(target, request))

    with serving(respond) as relay.uri:
        yield relay


def _forward(target: str, request: Request) -> Answer:
    headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
    answer = requests.request(
        request.method, target + request.target, data=request.body, headers=headers, timeout=30
    )
    return Answer(answer.status_code, answer.content)


def _meet(relay: Proxy, failure: Failure | None, forward: Callable[[], Answer]) -> Answer:
    def forward_late() -> None:
        forward()
        relay.late.set()

    match failure:
        case None:
            return forward()
        case "breaks":
            return Answer(500, "oops")
        case "is done without an answer":
            forward()
        case "is late":
            threading.Timer(relay.late_seconds, forward_late).start()
        case "is lost":
            pass
    raise NoAnswerError
