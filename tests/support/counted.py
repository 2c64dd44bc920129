"""What a block adds to the counters of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY

Samples = dict[str, float]


def _read_counters(prefix: str) -> Samples:
    """The counters, and the counts and sums of histograms, by name and values of labels."""
    return {
        f"{sample.name.removeprefix(prefix)} {' '.join(sample.labels.values())}".strip(): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if family.name.startswith(prefix) and sample.name.endswith(("_total", "_count", "_sum"))
    }


@contextmanager
def counted(prefix: str = "finetune_operator_") -> Iterator[Samples]:
    """Fill the samples, when the block ends, with what changed in it: the name without the prefix, and the values of its labels."""
    before, changes = _read_counters(prefix), Samples()
    yield changes
    after = _read_counters(prefix)
    changes |= {
        name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)
    }
