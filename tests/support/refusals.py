"""What the API server refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError

# The type that the API server names before the sentence of a rule.
_TYPE = re.compile('Invalid value: "(object|string|integer|boolean)": ')


@contextmanager
def refused(sentence: str) -> Iterator[None]:
    """The API server refuses what a block asks of it, with this sentence."""
    with pytest.raises(DynamicApiError) as refusal:
        yield
    assert sentence in _TYPE.sub("Invalid value: ", str(refusal.value.summary()))
