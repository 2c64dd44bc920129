"""Quantities of Kubernetes, as they are written, and as the JVM reads them."""

from __future__ import annotations

import pytest

from finetune_crds.quantity import format_bytes, jvm_memory

QUANTITIES = {"2Gi": "2097152k", "2G": "1953125k", "1.5Gi": "1572864k", "512Mi": "524288k", "2048": "2k"}


@pytest.mark.parametrize(("quantity", "memory"), QUANTITIES.items())
def test_a_quantity_is_memory_of_the_jvm(quantity: str, memory: str) -> None:
    assert jvm_memory(quantity) == memory


AMOUNTS = {0: "0Mi", 1: "1Mi", 2**30 - 1: "1024Mi", 2**30: "1.0Gi", 79_026_978_816: "73.6Gi"}


@pytest.mark.parametrize(("size", "quantity"), AMOUNTS.items())
def test_an_amount_of_memory_is_short(size: int, quantity: str) -> None:
    assert format_bytes(size) == quantity
