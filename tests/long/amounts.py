"""How much of each thing a run of the long tier does. The environment reduces it where there is less time."""

from __future__ import annotations

import os

KILLS = int(os.environ.get("LONG_KILLS", "500"))
"""Ends of the operator's process."""
OUTAGES = int(os.environ.get("LONG_OUTAGES", "60"))
"""Times that the API server or MLflow is away."""
DRIP_SECONDS = int(os.environ.get("LONG_DRIP_SECONDS", "180"))
"""How long MLflow, and then the API server, send their answers a byte at a time."""
TAKEOVERS = int(os.environ.get("LONG_TAKEOVERS", "60"))
"""Times that the leading replica of two is killed, stopped, paused or cut off."""
SEQUENCES = int(os.environ.get("LONG_SEQUENCES", "3000"))
"""Random sequences of events around a FineTuneJob, as many around a ModelPromotion, and a tenth around an endpoint."""
OPERATIONS = int(os.environ.get("LONG_OPERATIONS", "1000"))
"""Operations on FineTuneJobs and ModelPromotions, each with the oracles."""
ENDS = int(os.environ.get("LONG_ENDS", "20"))
"""Ends of a training run at random moments."""
SEED = int(os.environ.get("LONG_SEED", "0")) or int.from_bytes(os.urandom(3))
"""Of everything that is random and not hypothesis's; a test prints it, so that a failure can be repeated."""
