from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from cluster import cri

if TYPE_CHECKING:
    from pathlib import Path


class Runtime(grpc.GenericRpcHandler):
    """A container runtime that serves its version once it is initialized."""

    def __init__(self) -> None:
        self.initialized = False

    def service(self, details: Any) -> Any:
        assert details.method == "/runtime.v1.RuntimeService/Version"
        return grpc.unary_unary_rpc_method_handler(self.version)

    def version(self, _request: bytes, context: Any) -> bytes:
        if not self.initialized:
            context.abort(grpc.StatusCode.UNKNOWN, "server is not initialized yet")
        return b""


def test_a_runtime_serves_once_its_cri_is_initialized(tmp_path: Path) -> None:
    socket, runtime = str(tmp_path / "cri.sock"), Runtime()
    assert not cri.serves(socket)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[runtime])
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    try:
        before = cri.serves(socket)
        runtime.initialized = True
        assert (before, cri.serves(socket)) == (False, True)
    finally:
        server.stop(None).wait()
