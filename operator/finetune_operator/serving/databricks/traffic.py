"""Parses the traffic metrics that an endpoint of Model Serving exports, for the gates of a canary."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_REQUESTS = "request_count_total"
_CLIENT_ERRORS, _SERVER_ERRORS = "request_4xx_count_total", "request_5xx_count_total"
_LATENCY = "request_latency_ms"


def parse_traffic(text: str, entity: str) -> Mapping[str, float]:
    """The metrics of one served entity in the last minute, from the endpoint's metrics in Prometheus or OpenMetrics text format.

    A sample is the entity's if one of its labels, whatever its name, has the name of the entity as its value.

    The metrics are `request_count`, `error_rate` (the share of requests with a 4xx or 5xx answer), `server_error_rate` (5xx only) and
    `latency_ms` (the mean). A metric without data is left out; without requests, so are the rates.

    Raises:
        ValueError: the text has another format.
    """
    samples = [sample for sample in _parse_samples(text) if entity in sample.labels.values()]
    requests = _sum_samples(samples, _REQUESTS)
    numbers: dict[str, float] = {} if requests is None else {"request_count": requests}
    client_errors = _sum_samples(samples, _CLIENT_ERRORS) or 0.0
    server_errors = _sum_samples(samples, _SERVER_ERRORS) or 0.0
    if requests:
        numbers["error_rate"] = (client_errors + server_errors) / requests
        numbers["server_error_rate"] = server_errors / requests
    latency_sum = _sum_samples(samples, f"{_LATENCY}_sum")
    latency_count = _sum_samples(samples, f"{_LATENCY}_count")
    if latency_sum is not None and latency_count:
        numbers["latency_ms"] = latency_sum / latency_count
    return numbers


def _parse_samples(text: str) -> list[Sample]:
    # NB: sample names always keep the suffix _total. The names of counters' families lose the suffix, so families are not compared.
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _sum_samples(samples: list[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else None
