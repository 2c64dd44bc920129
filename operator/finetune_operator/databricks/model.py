"""A preparation as a Databricks run: what is submitted, and the state of the run. Plain data, which `decide` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_crds.contract import RunReport
from finetune_crds.databricks import Compute
from finetune_crds.status_parts import RunState

ENDED: tuple[RunState, ...] = ("Succeeded", "Failed", "Canceled")
"""The states of a run that has ended."""


@dataclass(frozen=True)
class Submission:
    """A run to submit.

    Attributes:
        name: the run's name in the workspace, by which the operator finds an active run again.
        token: idempotency token, at most 64 characters. Equal submissions have equal tokens, and the workspace starts only one run.
        volume: path of the volume for the wheel, such as /Volumes/main/default/finetune.
        folder: path of a folder in the volume, for the recipe and the result.
        recipe: the recipe as YAML.
        compute: the compute of the run.
        conf: Spark settings for a new cluster.
        mlflow_run: id of the job's MLflow run; empty without one.
        mlflow_host: address of the workspace or of the MLflow server that contains the MLflow run.
    """

    name: str
    token: str
    volume: str
    folder: str
    recipe: str
    compute: Compute
    conf: Mapping[str, str] = field(default_factory=dict)
    mlflow_run: str = ""
    mlflow_host: str = ""


@dataclass(frozen=True)
class Run:
    """The state of a run, from the workspace and from the run's folder.

    Attributes:
        word: the state in one word.
        url: address of the run's page.
        message: why the run ended, in the workspace's words; or why its report is not read.
        is_final: whether the same run would fail again: its compute or its permissions are wrong.
        progress: the step of the preparation, while the run is active.
        report: the report in the run's folder; None if there is none.
    """

    run_id: str
    word: RunState
    url: str = ""
    message: str = ""
    is_final: bool = False
    progress: str = ""
    report: RunReport | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.word in ENDED
