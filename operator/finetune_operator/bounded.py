"""HTTP to servers that users name: a deadline for each request, a size limit, no redirects, and no credentials of the operator.

NB: messages must not quote a response: through the operator, a user could read servers that only the operator can reach.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import ssl
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from yarl import URL

from finetune_operator.fence import PROCESS_FENCE, EventLoop, NotLeaderError
from finetune_operator.proxy import find_proxy

TIMEOUT_SECONDS = 10.0
_CHUNK_BYTES = 64 * 1024
_RESOLVING_THREADS = 32
# Control characters, which aiohttp refuses in headers.
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

# Receives a part of a body, and returns whether it needs more.
BodyConsumer = Callable[[bytes], bool]


@dataclass(frozen=True)
class Login:
    """A name and a password for Basic authentication. Without a password, the request has no Authorization header."""

    username: str = ""
    password: str = field(default="", repr=False)


ANONYMOUS = Login()


@dataclass(frozen=True)
class Response:
    """A response.

    Attributes:
        body: the decompressed body.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class NoResponseError(Exception):
    """The request got no complete response. The message explains the reason in the operator's own text."""


class ResponseTimeoutError(NoResponseError):
    """The response did not arrive before the deadline."""


class AddressError(NoResponseError):
    """The address is not a valid URL."""


class UnsendableError(NoResponseError):
    """The request has a header that cannot be sent; nothing was sent."""


class FencedError(NoResponseError):
    """The request writes, and this replica does not hold the Lease of the operator; nothing was sent."""


class TooLargeError(NoResponseError):
    """The response is larger than the size limit."""


async def fetch(
    url: str,
    *,
    headers: Mapping[str, str],
    login: Login = ANONYMOUS,
    body: bytes | None = None,
    max_bytes: int,
    take: BodyConsumer,
) -> int:
    """Send a GET, or a POST if there is a body, and return the status of the response. The request must not write.

    Args:
        max_bytes: size limit of the decompressed body.
        take: receives the body of a response with status 200; the body of any other response is not read.

    Raises:
        NoResponseError: the request cannot be sent, the server cannot be reached, or the response exceeds a limit.
        Exception: the error of `take`. It must not be a ValueError, which would become a NoResponseError.
    """
    sent_headers = dict(headers)
    if login.password:
        sent_headers["Authorization"] = basic_authorization(login)
    async with _exchange(
        "GET" if body is None else "POST", url, sent_headers, body, is_read=True
    ) as response:
        if response.status == HTTPStatus.OK:
            await _read_body(response, max_bytes, take)
        return response.status


async def send(method: str, url: str, *, headers: Mapping[str, str], body: bytes) -> int:
    """Send a request that writes, and return the status of the response, whose body is not read.

    Raises:
        NoResponseError: the request cannot be sent, or the server cannot be reached.
    """
    async with _exchange(method, url, headers, body, is_read=False) as response:
        return response.status


async def request(
    method: str,
    url: str | URL,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    max_bytes: int,
    is_read: bool = False,
) -> Response:
    """Send a request, and return the response, whatever its status.

    Args:
        max_bytes: size limit of the decompressed body.
        is_read: whether the request writes nothing, even if its method is POST.

    Raises:
        NoResponseError: the request cannot be sent, the server cannot be reached, or the response exceeds a limit.
    """
    parts: list[bytes] = []

    def take(part: bytes) -> bool:
        parts.append(part)
        return True

    async with _exchange(method, url, headers, body, is_read=is_read) as response:
        await _read_body(response, max_bytes, take)
        return Response(response.status, response.headers, b"".join(parts))


def request_in_thread(
    method: str,
    url: str | URL,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    max_bytes: int,
    is_read: bool = False,
) -> Response:
    """`request` for blocking clients. Do not call it on an event loop.

    Raises:
        NoResponseError: the request cannot be sent, the server cannot be reached, or the response exceeds a limit.
    """
    pending = request(method, url, headers=headers, body=body, max_bytes=max_bytes, is_read=is_read)
    return asyncio.run_coroutine_threadsafe(pending, _get_loop()).result()


def basic_authorization(login: Login) -> str:
    """The value of the Authorization header for a name and a password."""
    # NB: aiohttp's own function raises a ValueError if the name contains a colon.
    return f"Basic {b64encode(f'{login.username}:{login.password}'.encode()).decode()}"


@asynccontextmanager
async def _exchange(
    method: str, url: str | URL, headers: Mapping[str, str], body: bytes | None, *, is_read: bool
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request, and yield the response before its body is read. Each connection is used once.

    NB: a server closes idle connections (MLflow after 5 s, the interval at which the operator polls it). A request that is sent over a
    kept connection at that moment fails, and the client cannot know whether a write took effect: 7 of 48 such requests failed (MLflow
    3.17 on loopback, November 21, 2026).
    """
    if any(_UNSENDABLE.search(value) for value in headers.values()):
        raise UnsendableError("a header contains a control character")
    try:
        address = URL(url)
    except ValueError:
        raise AddressError("its address is not valid") from None
    try:
        # NB: trust_env would read the proxies, but also send the passwords in a .netrc, so `find_proxy` reads the proxies.
        async with (
            # The fence also cancels the request at the timeout; for a write, the timeout may be shorter than TIMEOUT_SECONDS.
            PROCESS_FENCE.limit(method, TIMEOUT_SECONDS, is_read=is_read) as timeout_seconds,
            aiohttp.ClientSession(trust_env=False) as session,
        ):
            # NB: aiohttp would repeat a DELETE whose response was lost, although the server may have carried it out.
            session._retry_connection = False  # noqa: SLF001
            async with session.request(
                method,
                address,
                data=body,
                headers=headers,
                proxy=find_proxy(str(address)),
                ssl=create_ssl_context(),
                allow_redirects=False,
            ) as response:
                try:
                    yield response
                finally:
                    _abort_connection(response)
        return
    except NotLeaderError as error:
        raise FencedError(str(error)) from None
    except TimeoutError:
        raise ResponseTimeoutError(f"no response within {round(timeout_seconds, 1):g} s") from None
    except aiohttp.ClientSSLError:
        why = "its certificate is not trusted"
    except aiohttp.ClientConnectionError:
        why = "the connection failed"
    except aiohttp.InvalidURL:
        raise AddressError("its address is not valid") from None
    except (aiohttp.ClientError, ValueError) as error:
        why = f"the request failed ({type(error).__name__})"
    raise NoResponseError(why) from None


_loop_lock = threading.Lock()


def _get_loop() -> asyncio.AbstractEventLoop:
    """The event loop of `request_in_thread`, in a thread of its own. The lock keeps two threads from starting two loops."""
    with _loop_lock:
        return _start_loop()


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = EventLoop()
    # NB: a name lookup cannot be canceled. With threads of their own, lookups that wait for a silent name server delay no other request.
    loop.set_default_executor(ThreadPoolExecutor(_RESOLVING_THREADS, "resolve"))
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


# A forked process has no threads of its parent, so it starts its own loop.
os.register_at_fork(after_in_child=_start_loop.cache_clear)


@functools.cache
def create_ssl_context() -> ssl.SSLContext:
    """The TLS context with the authorities of SSL_CERT_FILE or, without it, of the operator's image."""
    return ssl.create_default_context()


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int, take: BodyConsumer) -> None:
    """Give the body to `take` in parts, until `take` needs no more."""
    parts = response.content.iter_chunked(_CHUNK_BYTES)
    size = 0
    while True:
        try:
            part = await anext(parts)
        except StopAsyncIteration:
            return
        except RuntimeError:
            # aiohttp raises it if the connection was closed while reading was paused.
            raise NoResponseError("the connection was closed") from None
        size += len(part)
        if size > max_bytes:
            raise TooLargeError(f"the response is larger than {max_bytes} bytes")
        if not take(part):
            return
        # NB: without this pause, all buffered parts would be read at once while other tasks of the loop wait.
        await asyncio.sleep(0)


def _abort_connection(response: aiohttp.ClientResponse) -> None:
    """Abort the connection instead of closing it: a server can delay the closing handshake of TLS."""
    connection = response.connection
    if connection and connection.transport:
        connection.transport.abort()
