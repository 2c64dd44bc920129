"""TCP ports of this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path

# NB: a process that opens and closes this file elsewhere loses its reservations (fcntl(2), advisory record locking).
_RESERVATIONS = Path(tempfile.gettempdir()) / f"finetune-ports-{os.getuid()}"
_reserved: set[int] = set()


def free_port() -> int:
    """A free port that no other test process has reserved; each call in this process returns another one.

    A server may listen seconds after its port was chosen. Without reservations, another process of the tests could choose the
    same port in between, and talk to a server that is not its own.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _reserved and reserve(port):
            return port


def reserve(port: int) -> bool:
    """Lock the byte of a port in a file of all test processes, until this process ends; False if another one has it."""
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    _reserved.add(port)
    return True


@cache
def _reservations() -> int:
    """The descriptor of the file, which stays open."""
    return os.open(_RESERVATIONS, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server answers at a port of an address of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0
