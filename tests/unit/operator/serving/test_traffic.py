"""The numbers of a served version, from the metrics that an endpoint exports."""

from __future__ import annotations

import pytest

from finetune_operator.serving.databricks.traffic import parse_traffic
from fixtures.fake_databricks.endpoints import exported

LATENCY = """\
# TYPE request_latency_ms histogram
request_latency_ms_bucket{endpoint_name="support",served_entity_name="version-4",le="100"} 3 1790000000000
request_latency_ms_bucket{endpoint_name="support",served_entity_name="version-4",le="+Inf"} 4 1790000000000
request_latency_ms_sum{endpoint_name="support",served_entity_name="version-4"} 500 1790000000000
request_latency_ms_count{endpoint_name="support",served_entity_name="version-4"} 4 1790000000000
"""
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "nothing": ("", {}),
    "another version": (exported("support", {"3": (100, 1, 1)}), {}),
    "no requests": (exported("support", {"4": (0, 0, 0)}), {"request_count": 0}),
    "requests": (
        exported("support", {"3": (900, 0, 90), "4": (100, 3, 2)}),
        {"request_count": 100, "error_rate": 0.05, "server_error_rate": 0.02},
    ),
    "latency": (LATENCY, {"latency_ms": 125}),
    "counters": (
        '# TYPE request_count counter\nrequest_count_total{served_model_name="version-4"} 10\n',
        {"request_count": 10, "error_rate": 0, "server_error_rate": 0},
    ),
    "replicas": (
        'request_count_total{name="version-4",replica="a"} 1\nrequest_count_total{name="version-4",replica="b"} 2\n',
        {"request_count": 3, "error_rate": 0, "server_error_rate": 0},
    ),
}


@pytest.mark.parametrize(("text", "numbers"), CASES.values(), ids=CASES)
def test_numbers(text: str, numbers: dict[str, float]) -> None:
    assert parse_traffic(text, "version-4") == numbers


def test_what_is_no_metrics() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own
        parse_traffic('<html lang="en">', "version-4")
