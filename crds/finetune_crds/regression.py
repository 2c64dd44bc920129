"""`spec.onRegression` of a ModelPromotion: a number that is watched after the alias has moved to a candidate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import WEEK_IN_SECONDS, ApiModel, Name, ServerAddress, rules
from finetune_crds.env import LocalReference
from finetune_crds.gates import BOUNDS_RULES

_Seconds = Annotated[int, Field(ge=0, le=WEEK_IN_SECONDS)]


class PrometheusQuery(ApiModel):
    """A query whose result is one number."""

    url: ServerAddress
    """Address of the server. It has no login and no query; other servers with the API of Prometheus work too."""
    query: Annotated[str, Field(min_length=1, max_length=4096)]
    """PromQL with one number as its result now."""
    name: Name | None = None
    """Name of the number in messages. Default: the query."""
    secret_ref: LocalReference | None = None
    """Secret with PROMETHEUS_TOKEN, a bearer token. Default: no login."""


class OnRegression(ApiModel):
    """Reaction to a number that gets out of bounds after a move."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *BOUNDS_RULES,
            (
                "has(self.prometheus) != has(self.endpointMetric)",
                "set exactly one of prometheus and endpointMetric",
            ),
            (
                "self.forSeconds <= self.watchSeconds",
                "forSeconds must not be above watchSeconds",
                ".forSeconds",
            ),
        )
    )

    action: Literal["Rollback"]
    """Rollback: the alias moves back. The version is not promoted again."""
    prometheus: PrometheusQuery | None = None
    """Query of the number, for example the error rate of the endpoint."""
    endpoint_metric: Literal["request_count", "error_rate", "server_error_rate", "latency_ms"] | None = None
    """Metric of the version at the endpoint of spec.serving, as for the gates of a canary."""
    min: float | None = None
    """Minimum value that is good."""
    max: float | None = None
    """Maximum value that is good."""
    for_seconds: _Seconds
    """Seconds that the number must stay out of bounds. A number that cannot be read starts them again."""
    watch_seconds: Annotated[_Seconds, Field(ge=1)]
    """Seconds to watch the number after a move. With spec.serving, they start when the endpoint serves the version alone. A rollback or
    a repair is no such move."""
