"""Requests of containers whose template names none."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.batch.default_requests import REQUESTS, add_default_requests

Json = dict[str, Any]
# The resources that a template names, and those of the container with the defaults.
RESOURCES: dict[str, tuple[Any, Any]] = {
    "none": (None, {"requests": REQUESTS}),
    "empty": ({}, {"requests": REQUESTS}),
    "null": ({"requests": None, "limits": None}, {"requests": REQUESTS, "limits": None}),
    "GPUs": (
        {"limits": {"nvidia.com/gpu": 8}},
        {"limits": {"nvidia.com/gpu": 8}, "requests": REQUESTS},
    ),
    "a request of CPU": (
        {"requests": {"cpu": "4"}},
        {"requests": {"cpu": "4", "memory": "256Mi"}},
    ),
    "a limit of memory, which is a request too": (
        {"limits": {"memory": "8Gi"}},
        {"limits": {"memory": "8Gi"}, "requests": {"cpu": "100m"}},
    ),
    "both": (
        {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}},
        {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}},
    ),
    "no object": ("4", "4"),
    "no object in it": ({"requests": "4"}, {"requests": "4"}),
}


def pod(resources: Any, spec: Json | None = None) -> Json:
    container = {"name": "main"} | ({} if resources is None else {"resources": resources})
    return {"spec": {"containers": [container, {"name": "other"}], **(spec or {})}}


@pytest.mark.parametrize(("named", "expected"), RESOURCES.values(), ids=RESOURCES)
def test_a_container_requests_what_its_template_does_not_name(named: Any, expected: Any) -> None:
    assert add_default_requests(pod(named), "main") == pod(expected)


def test_resources_of_the_whole_pod_stay_alone() -> None:
    body = pod(None, {"resources": {"requests": {"cpu": "1"}}})
    assert add_default_requests(body, "main") == body


def test_no_default_exceeds_the_default_limit_of_a_limitrange() -> None:
    """The API server rejects a pod whose request exceeds the limit that a LimitRange sets; few set less than 256Mi."""
    assert REQUESTS == {"cpu": "100m", "memory": "256Mi"}
