"""The chart's admission policy for approvals, installed by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fixtures.operator_processes.servers import Plane
from integration.chart import CHART, KUBE_VERSION, helm

Json = dict[str, Any]


@contextmanager
def approval_policy(plane: Plane, release: str, tenants: Sequence[Json]) -> Iterator[None]:
    """Install the policy and the roles of people, and remove them at the end."""
    tenancy = {"tenants": tenants}
    done = helm(
        *("template", release, str(CHART), "--namespace", release, "--kube-version", KUBE_VERSION),
        *("--show-only", "templates/approvalpolicy.yaml", "--show-only", "templates/rbac-people.yaml"),
        *("--set", f"fullnameOverride={release}", "--set-json", f"tenancy={json.dumps(tenancy)}"),
    )
    assert done.returncode == 0, done.stderr

    def run(verb: str) -> None:
        command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), verb, "-f", "-"]
        subprocess.run(command, input=done.stdout, check=True, capture_output=True, text=True)

    run("create")
    try:
        yield
    finally:
        run("delete")
