"""What a rank tells the process of a sink: lines of JSON, first the settings, then entries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

SinkType = Literal["TensorBoard", "WandB"]


@dataclass(frozen=True)
class Settings:
    """The settings of a sink.

    target: the folder of TensorBoard, or the project of W&B.
    entity: of the project of W&B; None: the default of the API key.
    run_id: the id of W&B's run, the same for all pods of a job.
    run_name: what people see as the name of the run.
    writer: which pod writes, such as tune.attempt-2; part of the names of event files.
    has_system_metrics: whether W&B logs the CPU, memory and GPU metrics of the machine.
    """

    type: SinkType
    target: str
    run_id: str
    run_name: str
    writer: str
    entity: str | None = None
    has_system_metrics: bool = False

    def encode(self) -> str:
        """Return the settings as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Settings:
        """Read the settings from a line."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Start:
    """The attempt starts after `step`; later steps of earlier attempts are taken again."""

    step: int


@dataclass(frozen=True)
class Parameters:
    """Parameters of the run, by name."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Metrics:
    """Metrics at a step.

    time: seconds since the epoch.
    is_result: whether these are the numbers of an evaluation after the training, one for the whole run.
    """

    step: int
    time: float
    values: dict[str, float]
    is_result: bool = False


@dataclass(frozen=True)
class End:
    """The pod ends; `exit_code` 0: its work is done."""

    exit_code: int


Entry = Start | Parameters | Metrics | End
_KINDS: dict[str, type[Start | Parameters | Metrics | End]] = {
    kind.__name__: kind for kind in (Start, Parameters, Metrics, End)
}


def encode(entry: Entry) -> str:
    """Return an entry as a line."""
    # NB: values of parameters can have any type, such as a list or an enumeration.
    return json.dumps([type(entry).__name__, asdict(entry)], default=str)


def decode(line: str) -> Entry:
    """Read an entry from a line."""
    kind, fields = json.loads(line)
    return _KINDS[kind](**fields)
