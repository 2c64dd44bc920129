"""A preparation as a Databricks run: what is submitted, and what is known of it. Plain data, which `decide` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_crds.contract import RunReport
from finetune_crds.databricks import Compute
from finetune_crds.status_parts import RunWord


@dataclass(frozen=True)
class Submission:
    """A run to submit.

    Attributes:
        name: its name in the workspace, by which it is found again while it is active.
        token: equal submissions have equal tokens, of which the workspace runs one. At most 64 characters.
        volume: where the wheel goes.
        folder: where the recipe goes, and its result.
        recipe: the recipe as YAML.
        compute: what it runs on.
        conf: settings of Spark, for a new cluster.
        mlflow_run: the job's MLflow run; empty for none.
        mlflow_host: the workspace that has it; another address for an MLflow server.
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
    """A run as the workspace and its folder have it.

    Attributes:
        word: what it does.
        url: its page.
        message: why it ended, as the workspace says it.
        is_final: whether the same run would fail again: its compute or its permissions are wrong.
        progress: the step of the preparation, while it runs.
        report: what it left in its folder; None where it left nothing.
    """

    run_id: str
    word: RunWord
    url: str = ""
    message: str = ""
    is_final: bool = False
    progress: str = ""
    report: RunReport | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it does nothing any more."""
        return self.word in ENDED


ENDED: tuple[RunWord, ...] = ("Succeeded", "Failed", "Canceled")
