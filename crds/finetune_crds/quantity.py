"""Quantities of Kubernetes, such as 2Gi."""

from __future__ import annotations

import math

UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
"""The factors of the suffixes of quantities of bytes."""


def format_bytes(size: float) -> str:
    """Format a number of bytes: in Gi with one decimal; if it is less than 1Gi, in whole Mi, rounded up."""
    return f"{size / 2**30:.1f}Gi" if size >= 2**30 else f"{math.ceil(size / 2**20)}Mi"


def jvm_memory(quantity: str) -> str:
    """Format a quantity for the JVM: in KiB, rounded down.

    Raises:
        KeyError, ValueError: the text is not a quantity, which the schema of a recipe already refuses.
    """
    number = quantity.rstrip("kMGTi")
    unit = quantity[len(number) :]
    size_bytes = int(float(number) * UNITS[unit])
    return f"{size_bytes // 1024}k"
