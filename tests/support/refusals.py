"""What the API server refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError

# What the API server writes before the sentence of a rule: the type of the value, or since Kubernetes 1.37 the text itself.
_VALUE = re.compile(r'Invalid value: "(?:[^"\\]|\\.)*": ')


@contextmanager
def refused(sentence: str) -> Iterator[None]:
    """The API server refuses what a block asks of it, with this sentence."""
    with pytest.raises(DynamicApiError) as refusal:
        yield
    assert sentence in _VALUE.sub("Invalid value: ", str(refusal.value.summary()))
