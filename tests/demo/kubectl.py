"""kubectl and helm, called by name with the cluster's kubeconfig."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]


class DemoError(RuntimeError):
    """The demo cannot continue; the message says why and what to do."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl on one cluster."""

    program: Path
    kubeconfig: Path

    def __call__(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> str:
        """Run kubectl and return what it prints.

        Raises:
            DemoError: it failed, and the message holds kubectl's; or it did not end in time.
        """
        command = [str(self.program), "--kubeconfig", str(self.kubeconfig), *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            message = f"kubectl {' '.join(arguments)} did not end within {timeout:g} s: run the same `make` target again, it continues"
            raise DemoError(message) from error
        if check and done.returncode != 0:
            raise DemoError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Json | None:
        """An object, or a list of objects; None when the object does not exist."""
        text = self("get", *arguments, "--ignore-not-found", "--output", "json")
        return json.loads(text) if text.strip() else None

    def items(self, *arguments: str) -> list[Json]:
        """The objects of a list."""
        objects: list[Json] = (self.get(*arguments) or {"items": []})["items"]
        return objects

    def apply(self, manifest: str) -> None:
        """Apply a manifest."""
        self("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=manifest)


def render(file: Path, values: dict[str, str]) -> str:
    """A manifest with its ${names} filled in.

    Raises:
        KeyError: a value is missing.
    """
    return Template(file.read_text(encoding="utf-8")).substitute(values)


def explain_unready(pods: list[Json]) -> list[str]:
    """Why pods are not ready, as kubelets and the scheduler report it: `pod: ImagePullBackOff`."""
    return [
        f"{pod['metadata']['name']}: {reason}"
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        for reason in _find_delays(pod["status"])
    ]


def _find_delays(status: Json) -> list[str]:
    containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    waiting_reasons = {container["state"].get("waiting", {}).get("reason") for container in containers}
    unready = [
        f"the container {container['name']} runs and is not ready yet"
        for container in status.get("containerStatuses", [])
        if "running" in container["state"] and not container["ready"]
    ]
    refusals = [
        f"{condition['reason']}: {condition['message']}"
        for condition in status.get("conditions", [])
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
    return [*sorted(waiting_reasons - {None}), *unready, *refusals]
