"""Seeds of random numbers: a resumed run draws the same numbers."""

from __future__ import annotations

import numpy as np


def derive(*numbers: int) -> int:
    """Derive a seed from several numbers, for example the recipe's seed, a step and a rank."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
