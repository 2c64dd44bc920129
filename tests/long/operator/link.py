"""A connection between the operator and a server that can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Outage = Literal["refuses", "freezes", "loses"]
"""What becomes of connections: they are reset, and new ones too; nothing is passed on until the outage is over; what is
open never carries anything again, and neither side is told."""
OUTAGES: tuple[Outage, ...] = ("refuses", "freezes", "loses")
_BYTES = 1 << 16


class Link:
    """A port on loopback behind which another port is reached, unless there is an outage."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._outage: Outage | None = None
        self._passes = asyncio.Event()
        self._passes.set()
        self._open: set[_Connection] = set()

    async def serve(self, listens: threading.Event) -> None:
        """Accept connections until the task is cancelled."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        listens.set()
        try:
            await server.serve_forever()
        finally:
            self._close_all()

    async def begin(self, outage: Outage) -> None:
        """Let an outage begin."""
        self._outage = outage
        if outage == "refuses":
            self._close_all()
        else:
            self._passes.clear()

    async def end(self) -> None:
        """Let the outage be over."""
        if self._outage == "loses":
            for connection in self._open:
                connection.lost = True
        self._outage = None
        self._passes.set()

    def _close_all(self) -> None:
        for connection in self._open:
            connection.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._outage == "refuses":
            writer.transport.abort()
            return
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._target)
        connection = _Connection(writer, behind_writer)
        self._open.add(connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(connection, reader, behind_writer))
                tasks.create_task(self._pass_on(connection, behind_reader, writer))
        finally:
            self._open.discard(connection)
            connection.abort()

    async def _pass_on(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_BYTES):
                await self._passes.wait()
                if not connection.lost:
                    writer.write(data)
                    await writer.drain()
        if not connection.lost:
            connection.abort()


class _Connection:
    """Both halves of what is one connection for those at its ends."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.lost = False
        self._writers = writers

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class Outages:
    """Links, and a thread that they are served in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def link(self, target: int) -> Link:
        """A link to a port of this machine."""
        link, listens = Link(target), threading.Event()
        asyncio.run_coroutine_threadsafe(link.serve(listens), self._loop)
        assert listens.wait(10), f"no link to port {target}"
        return link

    @contextmanager
    def outage(self, link: Link, kind: Outage) -> Iterator[None]:
        """An outage for the time of a block."""
        asyncio.run_coroutine_threadsafe(link.begin(kind), self._loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(link.end(), self._loop).result()


@contextmanager
def outages() -> Iterator[Outages]:
    """Links for the time of a block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="links")
    thread.start()
    try:
        yield Outages(loop)
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
