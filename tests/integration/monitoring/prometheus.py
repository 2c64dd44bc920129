"""A real Prometheus that scrapes an operator over loopback."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from cluster import binaries
from support.ports import free_port
from support.process import Process
from support.waiting import wait_for

Json = dict[str, Any]


@dataclass
class Prometheus:
    """Prometheus, which scrapes the metrics port of an operator every second."""

    folder: Path
    target_port: int
    rules: Path

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        target = {"targets": [f"127.0.0.1:{self.target_port}"]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.rules)],
            "scrape_configs": [{"job_name": "finetune-operator", "static_configs": [target]}],
        }
        file = self.folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = [
            str(binaries.path("prometheus")),
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self._process = Process("prometheus", arguments, self.folder / "prometheus.log")

    def start(self) -> None:
        self._process.start()
        wait_for("Prometheus is ready", self._is_ready, instead=self._process.tail)

    def stop(self) -> None:
        self._process.stop()

    def query_range(self, expression: str, start: float) -> list[Json]:
        """The samples of an expression, second by second from a time until now."""
        times = {"start": str(start), "end": str(time.time()), "step": "1"}
        return list(self._get("query_range", query=expression, **times)["result"])

    def label_values(self, label: str, series: str) -> list[str]:
        """The values of a label of a series."""
        return list(self._get(f"label/{label}/values", **{"match[]": series}))

    def alerts(self) -> set[str]:
        """The alerts that are pending or fire."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"]}

    def rules_health(self) -> dict[str, str]:
        """Whether each alert could be evaluated, by its name."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/-/ready", timeout=10).ok
        except requests.ConnectionError:
            return False

    def _get(self, path: str, **query: str) -> Any:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=query, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]
