"""The table of generated answers in the format of MLflow's tables: the answers of both models side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from finetune_crds import contract

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from finetune_trainer.evaluate.questions import Question
    from finetune_trainer.pod.mlflow_run import Tracker

_FILE = "generations.json"


def log_table(
    tracker: Tracker,
    folder: Path,
    questions: Sequence[Question],
    references: Sequence[str],
    answers: Mapping[str, Sequence[str]],
) -> None:
    """Log a table with the columns prompt and reference, and one for each model.

    Args:
        tracker: logs the table to the run; if MLflow is unreachable for too long, the tracker prints a line.
        folder: the file is written here, and must stay until the tracker is closed.
        questions: the questions, one for each row of the table.
        references: the expected answer to each question.
        answers: the answers of each model, by the name of the model's column.
    """
    columns = {"prompt": [question.prompt for question in questions], "reference": references, **answers}
    # NB: MLflow's own function would append to the table that an earlier attempt has logged.
    content = {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}
    path = folder / _FILE
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tracker.table(path, contract.ARTIFACTS_EVALUATION)
