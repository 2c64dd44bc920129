"""The bounded client. test_repository tests its limits, as a server of Git can strain them."""

from __future__ import annotations

import asyncio
import os
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor

import pytest
from yarl import URL

from finetune_operator.bounded import (
    Login,
    Response,
    UnsendableError,
    basic_authorization,
    request,
    request_in_thread,
)
from support.http_server import Answer, Request, serving


def echo(request: Request) -> Answer:
    return Answer(409, {"method": request.method, "target": request.target, "body": request.body.decode()})


async def test_the_body_of_any_status_is_read() -> None:
    with serving(echo) as uri:
        response = await request(
            "DELETE", URL(f"{uri}/a?b=c%2Fd", encoded=True), headers={}, body=b"{}", max_bytes=1000
        )
    assert (response.status, response.body) == (
        409,
        b'{"method": "DELETE", "target": "/a?b=c%2Fd", "body": "{}"}',
    )


@pytest.mark.parametrize("character", [chr(code) for code in [*range(32), 127] if chr(code) != "\t"])
async def test_a_header_that_cannot_be_sent(character: str) -> None:
    with pytest.raises(UnsendableError):
        await request("GET", "http://127.0.0.1:1", headers={"A": f"a{character}b"}, max_bytes=1000)


@pytest.mark.parametrize("login", [Login("a:b", "c"), Login("\u00e9", "\u2019"), Login()])
def test_basic_authorization(login: Login) -> None:
    kind, _, encoded = basic_authorization(login).partition(" ")
    assert (kind, b64decode(encoded).decode()) == ("Basic", f"{login.username}:{login.password}")


async def test_each_connection_is_used_once() -> None:
    connections: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        while await reader.readuntil(b"\r\n\r\n"):
            connections[-1] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    uri = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        for _ in range(3):
            await request("GET", uri, headers={}, max_bytes=1000)
    finally:
        server.close()
    assert connections == [1, 1, 1]


def test_threads_ask_at_the_same_time() -> None:
    def ask(number: int) -> Response:
        return request_in_thread("GET", f"{uri}/{number}", headers={}, max_bytes=1000)

    with serving(echo) as uri, ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(ask, range(16)))
    assert [response.body.split(b'"')[7] for response in responses] == [
        f"/{number}".encode() for number in range(16)
    ]


def test_a_fork_asks_too() -> None:
    # The operator of the tests is a fork of a process that may have asked before.
    with serving(echo) as uri:
        request_in_thread("GET", uri, headers={}, max_bytes=1000)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(request_in_thread("GET", uri, headers={}, max_bytes=1000).status != 409)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
