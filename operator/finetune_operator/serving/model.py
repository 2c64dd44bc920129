"""The state of a serving endpoint, the actions on it, and what a backend of `spec.serving` must do."""

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
        failed: whether the last change failed or was cancelled; `message` then says why.
        message: why the last change failed, or why an endpoint that is configured does not answer.
        served: the configuration in force.
        pending: the configuration that it is changing to, or failed to change to; empty when none is reported.
        matches_spec: whether the configuration in force has the settings of the spec.
        logged_to: the table that requests are logged to; None when they are not logged.
        traffic: numbers of each served version in the last minute, by version; empty when the endpoint exports none.
        revision: changes with every requested change, also of the logging.
        url: where requests go.
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
    """Create the endpoint, or change it, so that it serves these versions with these shares, and no others."""

    served: tuple[ServedVersion, ...]
    create: bool


@dataclass(frozen=True)
class LogRequests:
    """Have the endpoint's requests logged to the table of the spec. Nothing may be logged to another table."""


@dataclass(frozen=True)
class StopLogging:
    """Have no more requests of the endpoint logged."""


EndpointAction = ConfigureEndpoint | LogRequests | StopLogging


class EndpointClient(Protocol):
    """The endpoint of one spec, with a login. Every method blocks."""

    def read(self) -> Endpoint:
        """The current state of the endpoint. Never raises: `problem` says why it could not be read."""

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete.

        Raises:
            ExternalError: the change is rejected. With the reason EndpointBusy another change is in progress: retry after it.
        """


class ServingBackend(Protocol):
    """`spec.serving` as the backend of its type reads it. Only the client that it opens does I/O."""

    @property
    def spec(self) -> Serving:
        """spec.serving."""

    @property
    def secret_ref(self) -> LocalReference | None:
        """The Secret with the login; None for the login of the installation."""

    @property
    def secret_field(self) -> str:
        """The field that names this Secret, for messages."""

    @property
    def configuration(self) -> object:
        """What the endpoint is configured with apart from the versions that it serves, as JSON."""

    @property
    def inference_table(self) -> InferenceTable | None:
        """The table that the spec has requests logged to."""

    @property
    def rejection_reasons(self) -> Collection[ConditionReason]:
        """The reasons with which a request of the client may be rejected, apart from EndpointBusy."""

    def find_mistakes(self, registry: str) -> Iterator[str]:
        """What the schema cannot see, for example that the endpoint serves no models of this registry."""

    def find_address(self, settings: Settings, secret: Mapping[str, str] | None) -> str:
        """The address of the server that has the endpoint.

        Raises:
            ExternalError: no server is known, or the Secret is incomplete.
        """

    def open_client(self, settings: Settings, secret: Mapping[str, str] | None) -> EndpointClient:
        """Log in with a Secret or, without one, as the installation. Blocks.

        Raises:
            ExternalError: no server is known, or the login failed.
        """
