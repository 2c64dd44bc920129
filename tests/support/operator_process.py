"""The operator as a process, with short intervals; and its metrics."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from support.forked_process import ForkedProcess
from support.ports import free_port
from support.process import Process


def operator_process(kubeconfig: Path, log: Path, environment: Mapping[str, str]) -> Process:
    """The operator as its pod starts it, not started yet; `environment` is added to its settings."""
    command = [sys.executable, "-m", "finetune_operator"]
    return Process("operator", command, log, _environment(kubeconfig, environment))


def forked_operator(
    kubeconfig: Path,
    log: Path,
    settings: Mapping[str, str],
    *,
    stop_signal: signal.Signals = signal.SIGKILL,
) -> Process:
    """The operator as a fork, which starts sooner; not started yet.

    Args:
        settings: added to its environment. They must not contain variables that are read while the operator is imported.
        stop_signal: what `stop` sends. Default: SIGKILL, since kopf takes five seconds to end.
    """
    environment = _environment(kubeconfig, settings)
    function = f"{__name__}:{run_forked.__name__}"
    return ForkedProcess("operator", [function], log, environment, stop_signal=stop_signal)


def run_forked() -> int:
    """Run the operator in a fork; the exit code."""
    from kubernetes.aio.config import kube_config

    from finetune_operator.__main__ import main

    # NB: the client of Kubernetes reads the variable while it is imported, which was before the fork.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    return main()


def _environment(kubeconfig: Path, more: Mapping[str, str]) -> dict[str, str]:
    # NB: the operators of tests share a namespace. A process that is started again takes its Lease back at once.
    name = f"operator-{uuid.uuid4().hex[:8]}"
    return {
        "FINETUNE_LEASE_NAME": name,
        "FINETUNE_REPLICA": name,
        # A busy machine may let a process wait for longer than the Lease of an operator lasts.
        "FINETUNE_LEASE_SECONDS": "60",
        "KUBECONFIG": str(kubeconfig),
        "FINETUNE_LIVENESS": f"http://127.0.0.1:{free_port()}/healthz",
        "FINETUNE_METRICS_PORT": str(free_port()),
        "FINETUNE_RESYNC_SECONDS": "5",
        "FINETUNE_POLL_SECONDS": "0.5",
        "FINETUNE_NETWORK_POLICIES": "true",
        **more,
    }


def watching(namespace: str, tracking_uri: str, *, resync_seconds: int = 5) -> dict[str, str]:
    """The settings of an operator that watches one namespace."""
    return {
        "FINETUNE_NAMESPACES": namespace,
        "FINETUNE_TRACKING_URI": tracking_uri,
        "FINETUNE_RESYNC_SECONDS": str(resync_seconds),
    }


def metric(operator: Process, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, since the operator was started; 0 while it does not answer."""
    port = operator.environment["FINETUNE_METRICS_PORT"]
    try:
        text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    except requests.ConnectionError:
        return 0
    samples = [item for family in text_string_to_metric_families(text) for item in family.samples]
    return sum(item.value for item in samples if item.name == name and labels.items() <= item.labels.items())
