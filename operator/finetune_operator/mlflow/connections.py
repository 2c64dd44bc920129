"""Makes MLflow's client use each connection once. Importing this module is enough, for the whole process.

NB: MLflow's server closes a connection that was idle for 5 s, which is how often the operator asks. A request that is
sent at that moment fails with "Connection reset by peer": over a kept connection, 7 of 48 requests at intervals of about
5 s failed (MLflow 3.17 on loopback, November 21, 2026). After such a failure it is unknown whether a write was made.
"""

from __future__ import annotations

from mlflow.tracking.request_header import registry
from mlflow.tracking.request_header.abstract_request_header_provider import RequestHeaderProvider


class ConnectionOnce(RequestHeaderProvider):
    """Asks the server to close the connection after its answer."""

    def in_context(self) -> bool:
        """Whether to send the header: always."""
        return True

    def request_headers(self) -> dict[str, str]:
        """The header."""
        return {"Connection": "close"}


registry._request_header_provider_registry.register(ConnectionOnce)  # noqa: SLF001 - an entry point would apply wherever the operator is installed
