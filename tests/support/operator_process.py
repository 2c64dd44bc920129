"""The operator as a process, as it is started in its pod, with short intervals."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from support.ports import free_port
from support.process import Process


def operator_process(kubeconfig: Path, log: Path, environment: Mapping[str, str]) -> Process:
    """The operator, not started yet; `environment` is added to its settings."""
    settings = {
        "KUBECONFIG": str(kubeconfig),
        "FINETUNE_LIVENESS": f"http://127.0.0.1:{free_port()}/healthz",
        "FINETUNE_METRICS_PORT": "0",
        "FINETUNE_RESYNC_SECONDS": "5",
        "FINETUNE_POLL_SECONDS": "0.5",
    }
    return Process("operator", [sys.executable, "-m", "finetune_operator"], log, {**settings, **environment})
