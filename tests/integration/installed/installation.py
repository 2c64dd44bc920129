"""A release of the chart on an API server without nodes: the operator runs as a process with its ServiceAccount's rights."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from fixtures.operator_processes.servers import Plane
from integration.chart import CHART, environment_of, helm
from support.api import Api
from support.operator_process import forked_operator
from support.ports import free_port
from support.process import Process

Json = dict[str, Any]
RELEASE, SYSTEM = "finetune-operator", "finetune-system"


@dataclass
class Installation:
    """One release, and the process that stands for its only pod."""

    plane: Plane
    api: Api
    folder: Path
    release: str = RELEASE
    chart: str = str(CHART)
    _operator: Process | None = None
    _health: str = ""

    def install(self, *values: str, options: Sequence[str] = ()) -> None:
        """Install the release, or upgrade it; `name=value` each. Its pod is replaced, as the Deployment would do it."""
        settings = [word for value in values for word in ("--set", value)]
        self._helm(
            "upgrade", "--install", self.release, self.chart, "--create-namespace", *options, *settings
        )
        self.stop()
        self._start()

    @property
    def operator(self) -> Process:
        """The release's operator."""
        assert self._operator is not None
        return self._operator

    def uninstall(self) -> None:
        """Uninstall the release; its pod ends."""
        self._helm("uninstall", self.release, "--ignore-not-found")
        self.stop()

    def remove(self) -> None:
        """Kill the operator, if it was started, and uninstall the release."""
        if self._operator:
            self._operator.kill()
        self.uninstall()

    def notes(self) -> str:
        """What helm said of the newest installation, joined to one line."""
        return " ".join(self._helm("get", "notes", self.release).split())

    def stop(self) -> None:
        """End the operator."""
        if self._operator:
            self._operator.stop()

    def healthy(self) -> bool:
        """Whether the probes of the pod would succeed."""
        try:
            return requests.get(self._health, timeout=5).ok
        except requests.ConnectionError:
            return False

    def log(self) -> str:
        """What the operator has printed since the first install; nothing if it was not started."""
        return self._operator.log.read_text(encoding="utf-8") if self._operator else ""

    def _start(self) -> None:
        name = RELEASE if RELEASE in self.release else f"{self.release}-{RELEASE}"
        deployment = self.api.get("Deployment", SYSTEM, name)
        assert deployment is not None
        pod = deployment["spec"]["template"]["spec"]
        path = pod["containers"][0]["livenessProbe"]["httpGet"]["path"]
        self._health = f"http://127.0.0.1:{free_port()}{path}"
        short = {
            "FINETUNE_RESYNC_SECONDS": "2",
            "FINETUNE_POLL_SECONDS": "0.5",
            "FINETUNE_LIVENESS": self._health,
            "FINETUNE_DEFAULTS": str(self._defaults(name)),
        }
        environment = {**environment_of(deployment, SYSTEM), **short}
        kubeconfig = self._kubeconfig(pod["serviceAccountName"])
        log = self.folder / "operator.log"
        # As the kubelet ends a pod.
        self._operator = forked_operator(kubeconfig, log, environment, stop_signal=signal.SIGTERM)
        self._operator.start()

    def _defaults(self, name: str) -> Path:
        """The file that the pod would mount."""
        config_map = self.api.get("ConfigMap", SYSTEM, f"{name}-defaults")
        assert config_map is not None
        file = self.folder / "defaults.yaml"
        file.write_text(config_map["data"]["defaults.yaml"], encoding="utf-8")
        return file

    def _kubeconfig(self, account: str) -> Path:
        """A kubeconfig with a token of the pod's ServiceAccount."""
        command = [str(self.plane.kubectl), "--kubeconfig", str(self.plane.kubeconfig), "--namespace", SYSTEM]
        command += ["create", "token", account]
        token = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        content = yaml.safe_load(self.plane.kubeconfig.read_text(encoding="utf-8"))
        for user in content["users"]:
            user["user"] = {"token": token}
        file = self.folder / "operator.kubeconfig"
        file.write_text(json.dumps(content), encoding="utf-8")
        return file

    def _helm(self, *arguments: str) -> str:
        done = helm(*arguments, "--namespace", SYSTEM, "--kubeconfig", str(self.plane.kubeconfig))
        assert done.returncode == 0, done.stderr
        return done.stdout
