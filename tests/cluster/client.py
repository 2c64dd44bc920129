"""As much of an API client as bringing up a cluster needs: JSON over HTTPS with a client certificate."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.certificates import Pair


class Client:
    """Talks to one API server as one user."""

    def __init__(self, server: str, authority: Path, user: Pair, timeout: float = 5) -> None:
        self.server = server
        self.timeout = timeout
        context = ssl.create_default_context(cafile=str(authority))
        context.load_cert_chain(user.certificate, user.key)
        # NB: no proxy, even if the environment names one: the server is on this machine.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def call(
        self, method: str, path: str, body: object = None, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """The status and the body of one response. A status of 400 or more raises nothing."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, {"Content-Type": kind}, method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())

    def get(self, path: str) -> Any:
        """What is at `path`, or None if that cannot be had now."""
        try:
            status, answer = self.call("GET", path)
        except OSError:
            return None
        return answer if status == 200 else None

    def ready(self) -> bool:
        """Whether the server says that it is ready."""
        return bool(self.get("/readyz") == "ok")

    def apply(self, path: str, body: dict[str, Any]) -> None:
        """Create or change an object by server-side apply; fails with the server's words."""
        query = f"{path}?fieldManager=cluster&force=true"
        status, answer = self.call("PATCH", query, body, "application/apply-patch+yaml")
        if status >= 300:
            raise RuntimeError(f"cannot apply {path}: {status} {answer}")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
