"""`python -m cluster.cri SOCKET`: whether a container runtime serves the CRI behind a socket; 1 where it does not yet.

It is a program, since gRPC's threads do not go together with processes that fork, such as the supervisor of a cluster.
"""

from __future__ import annotations

import sys

import grpc

_VERSION = "/runtime.v1.RuntimeService/Version"


def serves(socket: str) -> bool:
    """Ask for the version, as a kubelet does at its start.

    NB: containerd answers its own clients before its CRI is initialized ("server is not initialized yet"), and a kubelet that
    comes in between ends.
    """
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        try:
            # A request without fields is empty.
            channel.unary_unary(_VERSION)(b"", timeout=5)
        except grpc.RpcError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(not serves(sys.argv[1]))
