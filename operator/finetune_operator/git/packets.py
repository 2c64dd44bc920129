"""Git's packet lines: a length of four hexadecimal digits, which counts itself, and then the line.

https://git-scm.com/docs/protocol-common
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

FLUSH = b"0000"
DELIMITER = b"0001"
_SPECIAL = 4


def packet(line: str) -> bytes:
    """A line as a packet."""
    content = f"{line}\n".encode()
    return f"{len(content) + _SPECIAL:04x}".encode() + content


def request(command: Iterable[str], arguments: Iterable[str]) -> bytes:
    """A request of version 2: a command with its capabilities, and its arguments."""
    return b"".join([*map(packet, command), DELIMITER, *map(packet, arguments), FLUSH])


def lines(body: bytes) -> Iterator[str]:
    """The lines in a response, without those that only separate.

    Raises:
        ValueError: it is something else.
    """
    position = 0
    while position < len(body):
        length = int(body[position : position + _SPECIAL], 16)
        end = position + max(length, _SPECIAL)
        if end > len(body):
            raise ValueError("a packet ends early")
        if length > _SPECIAL:
            yield body[position + _SPECIAL : end].decode("utf-8", "replace").rstrip("\n")
        position = end
