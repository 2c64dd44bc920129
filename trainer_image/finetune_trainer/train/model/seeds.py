"""Seeds of random numbers that a resumed run draws again."""

from __future__ import annotations

import numpy as np


def derive(*numbers: int) -> int:
    """Derive one seed from several numbers, such as a recipe's seed, a step and a rank."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
