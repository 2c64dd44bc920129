"""What a person does in MLflow by hand, in a pod of the cluster."""

from __future__ import annotations

import uuid
from typing import Any

from demo.install import Installation
from e2e.jobs import told


def by_hand(installation: Installation, *arguments: str) -> Any:
    """Run `scripts/by_hand.py` with these arguments; what came of it."""
    name = f"by-hand-{uuid.uuid4().hex[:6]}"
    installation.start_script(name, f"python by_hand.py {' '.join(arguments)}")
    found = told(installation.finish_script(name), "RESULT")
    installation.delete("job", name)
    return found
