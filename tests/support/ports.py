"""TCP ports of this machine."""

from __future__ import annotations

import socket

_given: set[int] = set()


def free_port() -> int:
    """A free port; each call in this process returns another one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server answers at a port of an address of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0
