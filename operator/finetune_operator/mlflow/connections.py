"""Has MLflow's client use each connection once; importing this module does it, for the whole process.

NB: MLflow's server closes a connection that was idle for 5 s, which is how often the operator asks. A request that goes
out at that moment fails with "Connection reset by peer": with one connection kept, 7 of 48 requests at intervals of about
5 s did (MLflow 3.17 on loopback, November 21, 2026), and of a write nobody could tell whether it was made.
"""

from __future__ import annotations

from mlflow.tracking.request_header import registry
from mlflow.tracking.request_header.abstract_request_header_provider import RequestHeaderProvider


class ConnectionOnce(RequestHeaderProvider):
    """Asks the server to close the connection after its answer."""

    def in_context(self) -> bool:
        """Whether the header is wanted: always."""
        return True

    def request_headers(self) -> dict[str, str]:
        """The header."""
        return {"Connection": "close"}


registry._request_header_provider_registry.register(ConnectionOnce)  # noqa: SLF001 - the other way, an entry point, would count wherever the operator is installed
