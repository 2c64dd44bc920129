"""The state of a serving endpoint, the actions on it, and the interface of a backend of `spec.serving`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from finetune_crds.conditions import ConditionReason
from finetune_crds.env import LocalReference
from finetune_crds.serving import InferenceTable, Serving
from finetune_operator.errors import Problem
from finetune_operator.settings import Settings


@dataclass(frozen=True)
class ServedVersion:
    """A version that the endpoint serves, and its share of the traffic in percent.

    `model` is empty for an entity that is not a registered model, such as another provider's.
    """

    model: str
    version: str
    percent: int = 0


@dataclass(frozen=True)
class Endpoint:
    """A serving endpoint as last read. When `problem` is set, nothing else is known.

    Attributes:
        exists: whether the endpoint exists.
        ready: whether it answers requests.
        updating: whether a change of its configuration is in progress, by this operator or by others.
        failed: whether the last change failed or was cancelled; `message` then has the reason.
        message: why the last change failed, or why a configured endpoint does not answer.
        served: the configuration in force.
        pending: the configuration of the current or failed change; empty if none is reported.
        matches_spec: whether the configuration in force has the settings of the spec.
        logged_to: the table that requests are logged to; None if they are not logged.
        traffic: metrics of each served version in the last minute, by version and then by name; empty if the endpoint exports none.
        revision: differs after every requested change, including changes of the logging; None if it is not reported.
        url: address for requests.
    """

    exists: bool = False
    ready: bool = False
    updating: bool = False
    failed: bool = False
    message: str = ""
    served: tuple[ServedVersion, ...] = ()
    pending: tuple[ServedVersion, ...] = ()
    matches_spec: bool = True
    logged_to: InferenceTable | None = None
    traffic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    revision: str | None = None
    url: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class ConfigureEndpoint:
    """Create the endpoint, or change it, so that it serves exactly these versions with these shares."""

    served: tuple[ServedVersion, ...]
    create: bool


@dataclass(frozen=True)
class LogRequests:
    """Start logging the endpoint's requests to the table of the spec. The endpoint must not be logging to another table."""


@dataclass(frozen=True)
class StopLogging:
    """Stop logging the endpoint's requests."""


EndpointAction = ConfigureEndpoint | LogRequests | StopLogging


class EndpointClient(Protocol):
    """The endpoint of one spec, with a login. Every method blocks."""

    def read(self, *, with_traffic: bool) -> Endpoint:
        """Return the current state of the endpoint.

        Args:
            with_traffic: also read the metrics of each served version.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete.

        Raises:
            ExternalError: the change is rejected. With the reason EndpointBusy another change is in progress: retry after it.
        """


class ServingBackend(Protocol):
    """A backend for one type of `spec.serving`. Only the client that it opens does I/O."""

    @property
    def spec(self) -> Serving:
        """spec.serving."""

    @property
    def secret_ref(self) -> LocalReference | None:
        """The Secret with the login; None for the chart's login."""

    @property
    def secret_field(self) -> str:
        """The field of the spec that names this Secret, for messages."""

    @property
    def configuration(self) -> object:
        """The configuration of the endpoint without the versions that it serves, as JSON."""

    @property
    def inference_table(self) -> InferenceTable | None:
        """The spec's table for logged requests; None without logging."""

    @property
    def rejection_reasons(self) -> Collection[ConditionReason]:
        """The possible reasons for a rejected request of the client, other than EndpointBusy."""

    def find_mistakes(self, registry: str) -> Iterator[str]:
        """A message for each mistake that the schema cannot detect, such as a registry whose models the endpoint cannot serve."""

    def find_address(self, settings: Settings, secret: Mapping[str, str] | None) -> str:
        """The address of the server that has the endpoint.

        Raises:
            ExternalError: no server is known, or the Secret is incomplete.
        """

    def open_client(self, settings: Settings, secret: Mapping[str, str] | None) -> EndpointClient:
        """Log in with a Secret or, without a Secret, with the chart's login. Blocks.

        Raises:
            ExternalError: no server is known, or the login failed.
        """
