"""Git's packet lines: a length in four hexadecimal digits, and then the line. The length counts the digits too.

https://git-scm.com/docs/protocol-common

NB: dulwich reads these lines too, but it keeps every ref that a server lists. For the 480,000 refs of a response of 30 MiB, dulwich
needs 103 MiB of memory, and the module `refs` 0.1 MiB. The size and the time of dulwich's requests can be limited only by overriding a
private method, and a line that is not a ref raises an IndexError (dulwich 1.2.21, measured on 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FLUSH = b"0000"
DELIMITER = b"0001"
_LENGTH_BYTES = 4
# The limit for packets without a line: a list of refs needs only two of them, as separators.
_MAX_EMPTY_PACKETS = 16


def encode_packet(line: str) -> bytes:
    """Encode a line as a packet."""
    content = f"{line}\n".encode()
    return f"{len(content) + _LENGTH_BYTES:04x}".encode() + content


def encode_request(command: Iterable[str], arguments: Iterable[str]) -> bytes:
    """Encode a request of protocol version 2: a command with its capabilities, and its arguments."""
    return b"".join([*map(encode_packet, command), DELIMITER, *map(encode_packet, arguments), FLUSH])


class PacketError(Exception):
    """The data are not the response of a Git server."""


class RefusedError(PacketError):
    """The server reports an error. NB: the server's text is not shown, since it may be anything."""


@dataclass
class Packets:
    """Splits a response into lines, part by part, so that a long response is never in memory as a whole."""

    _buffer: bytes = b""
    """The beginning of a packet that is not yet complete."""
    _empty: int = 0
    """The number of packets without a line."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The lines that this part completes, without separators. Read the iterator to its end before the next part.

        Raises:
            PacketError: the data are not packets.
        """
        buffer, position = self._buffer + part, 0
        while position + _LENGTH_BYTES <= len(buffer):
            length = _parse_length(buffer[position : position + _LENGTH_BYTES])
            # The lengths 0 to 4: a packet of only the four digits, such as FLUSH.
            is_empty = length <= _LENGTH_BYTES
            if is_empty:
                self._empty += 1
                if self._empty > _MAX_EMPTY_PACKETS:
                    raise PacketError("too many packets without a line")
            end = position + (_LENGTH_BYTES if is_empty else length)
            if end > len(buffer):
                break
            if not is_empty:
                yield buffer[position + _LENGTH_BYTES : end].removesuffix(b"\n")
            position = end
        self._buffer = buffer[position:]

    def end(self) -> None:
        """Check that the last packet is complete.

        Raises:
            PacketError: the packet is incomplete.
        """
        if self._buffer:
            raise PacketError("a packet ends early")


def _parse_length(digits: bytes) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        raise PacketError("no packet") from None
