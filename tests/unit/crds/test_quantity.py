"""Quantities of Kubernetes as the JVM reads them."""

from __future__ import annotations

import pytest

from finetune_crds.quantity import jvm_memory

QUANTITIES = {"2Gi": "2097152k", "2G": "1953125k", "1.5Gi": "1572864k", "512Mi": "524288k", "2048": "2k"}


@pytest.mark.parametrize(("quantity", "memory"), QUANTITIES.items())
def test_a_quantity_is_memory_of_the_jvm(quantity: str, memory: str) -> None:
    assert jvm_memory(quantity) == memory
