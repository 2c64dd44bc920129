"""kubectl and helm, called by name with the cluster's kubeconfig."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from support.waiting import WaitError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
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
            DemoError: it failed; the message holds kubectl's.
        """
        command = [str(self.program), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout
        )
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


def pod_trouble(pods: list[Json]) -> list[str]:
    """Why containers do not run, as kubelets and the scheduler report it: `pod: ImagePullBackOff`."""
    troubles = []
    for pod in pods:
        status = pod["status"]
        containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        reasons = {container["state"].get("waiting", {}).get("reason") for container in containers}
        usual = {None, "ContainerCreating", "PodInitializing"}
        refusals = [
            f"{condition['reason']}: {condition['message']}"
            for condition in status.get("conditions", [])
            if condition["type"] == "PodScheduled" and condition["status"] == "False"
        ]
        troubles += [
            f"{pod['metadata']['name']}: {reason}" for reason in (*sorted(reasons - usual), *refusals)
        ]
    return troubles


def wait_until_complete(
    what: str, find_missing: Callable[[], str | None], *, timeout: float, say: Callable[[str], None]
) -> None:
    """Wait until nothing is missing, and show once whatever is.

    Raises:
        DemoError: something is still missing after the timeout.
    """
    shown: list[str] = []

    def is_complete() -> bool:
        missing = find_missing()
        if missing is not None and missing not in shown:
            say(missing)
            shown.append(missing)
        return missing is None

    try:
        wait_for(what, is_complete, timeout, instead=find_missing, pause=1)
    except WaitError as error:
        raise DemoError(str(error)) from error
