"""HTTP with servers that a user names: a deadline for all of a request, a most of bytes, no redirects, nothing of the operator's own.

NB: no text of a response may reach a message: such a server can be one that only the operator reaches.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

SECONDS = 10.0
_CHUNK = 64 * 1024

Take = Callable[[bytes], bool]


@dataclass(frozen=True)
class Login:
    """A name and a password for Basic authentication; both empty for none."""

    username: str = ""
    password: str = field(default="", repr=False)


ANONYMOUS = Login()


class UnansweredError(Exception):
    """No response came: the message says why, in words that are the operator's own."""


async def fetch(
    url: str,
    *,
    headers: Mapping[str, str],
    login: Login = ANONYMOUS,
    body: bytes | None = None,
    most_bytes: int,
    take: Take,
) -> int:
    """The status of the response to a GET, or to a POST where there is a body.

    Args:
        most_bytes: of the body, after it is decompressed.
        take: gets the body of a response with status 200, a part at a time; returns whether the rest is needed.

    Raises:
        UnansweredError: the server cannot be reached, takes longer, or sends more.
        Exception: what `take` raises, which must not be a ValueError: that would read as a failed request.
    """
    limit = aiohttp.ClientTimeout(total=SECONDS)
    sent = dict(headers)
    if login.password:
        sent["Authorization"] = aiohttp.encode_basic_auth(login.username, login.password)
    try:
        # NB: trust_env would also send passwords of a .netrc.
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=False) as session,
            session.request(
                "GET" if body is None else "POST",
                url,
                data=body,
                headers=sent,
                proxy=_proxy(url),
                ssl=trusted(),
                allow_redirects=False,
            ) as answer,
        ):
            try:
                if answer.status == HTTPStatus.OK:
                    await _read(answer, most_bytes, take)
                return answer.status
            finally:
                _drop(answer)
    except TimeoutError:
        why = f"it took longer than {SECONDS:g} s"
    except aiohttp.ClientSSLError:
        why = "its certificate is not trusted"
    except aiohttp.ClientConnectionError:
        why = "no connection can be made"
    except (aiohttp.ClientError, ValueError) as error:
        why = f"the request failed ({type(error).__name__})"
    raise UnansweredError(why)


@functools.cache
def trusted() -> ssl.SSLContext:
    """The authorities that the operator trusts: those of SSL_CERT_FILE, or of its image."""
    return ssl.create_default_context()


def _proxy(url: str) -> str | None:
    """The proxy for an address, from HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


async def _read(answer: aiohttp.ClientResponse, most: int, take: Take) -> None:
    seen = 0
    async for part in answer.content.iter_chunked(_CHUNK):
        seen += len(part)
        if seen > most:
            raise UnansweredError(f"its answer is larger than {most} bytes")
        if not take(part):
            return
        # NB: parts that have come already would be read one after the other, and nothing beside them.
        await asyncio.sleep(0)


def _drop(answer: aiohttp.ClientResponse) -> None:
    """Abort the connection of a response whose rest is not read: a server can draw out the end that TLS agrees on."""
    connection = answer.connection
    if connection and connection.transport:
        connection.transport.abort()
