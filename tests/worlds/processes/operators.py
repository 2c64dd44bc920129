"""One operator for the tests of a worker that do not end it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.api import Api
from support.operator_process import forked_operator
from support.process import Process

_NAMESPACES = 8


def new_namespace(api: Api) -> str:
    """Create a namespace for one test; its name."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@dataclass
class SharedOperator:
    """An operator that watches some namespaces, one for each test.

    Each operator of the tier watches namespaces that no other one does, so that tests do not disturb each other. A
    watch stream a namespace and kind is not free: when the namespaces are used up, another operator takes over.
    """

    api: Api
    kubeconfig: Path
    folder: Path
    settings: dict[str, str]
    _process: Process | None = None
    _unused: list[str] = field(default_factory=list)
    _started: int = 0

    def namespace(self) -> str:
        """A watched namespace that no test has used."""
        if not self._unused or self._process is None or not self._process.alive():
            self._start()
        return self._unused.pop()

    def log(self) -> Path:
        """Where the operator of the last namespace writes."""
        assert self._process is not None
        return self._process.log

    def stop(self) -> None:
        """End the operator."""
        if self._process:
            self._process.stop()

    def _start(self) -> None:
        self.stop()
        self._unused = [new_namespace(self.api) for _ in range(_NAMESPACES)]
        self._started += 1
        settings: dict[str, Any] = {**self.settings, "FINETUNE_NAMESPACES": ",".join(self._unused)}
        log = self.folder / f"operator-{self._started}.log"
        self._process = forked_operator(self.kubeconfig, log, settings)
        self._process.start()
