"""What the API server refuses and accepts of an inference table with its feedback."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import DPO, KTO, UNITY, Json
from support.api import Api
from support.refusals import refused

FEEDBACK: Json = {"path": "s3://lake/feedback", "requestIdColumn": "id", "ratingColumn": "thumb"}
SOURCE: Json = {"type": "InferenceTable", "path": "s3://lake/logged", "feedback": FEEDBACK}
PREPARE: Json = {"output": "s3://lake/splits", "onTemplateError": "Drop"}
TABLES: Json = SOURCE | {
    "path": None,
    "table": "main.llm.logged",
    "feedback": FEEDBACK | {"path": None, "table": "main.llm.feedback"},
}


def without_nulls(fields: Json) -> Json:
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def served(
    feedback: Json | None = None,
    *,
    source: Json = SOURCE,
    prepare: Json | None = None,
    columns: Json | None = None,
    **parts: Any,
) -> Json:
    """A job that learns from an inference table, with fields of feedback and of prepare replaced; None removes one."""
    data = {
        "source": source | {"feedback": source["feedback"] | (feedback or {})},
        "prepare": PREPARE | (prepare or {}),
        "columns": columns,
    }
    return job(data=without_nulls(data), **parts)


def on_databricks(**fields: Any) -> Json:
    """Fields of prepare for a Databricks run."""
    return {"spark": {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}, **fields}


NO_COLUMNS = "source.type InferenceTable makes columns of type Messages, Preference or Unpaired with their default names: remove columns"
CONVERSATIONS = (
    "source.type InferenceTable, whose examples are conversations, requires prepare.onTemplateError Drop, without prepare.promptTemplate, "
    "responseTemplate and conversation"
)
REFUSED: dict[str, tuple[Json, str]] = {
    "no feedback": (
        job(data={"source": {"type": "InferenceTable", "path": "/a"}, "prepare": PREPARE}),
        "type InferenceTable requires feedback, and the other types forbid it",
    ),
    "feedback on a corpus": (
        job(data={"source": SOURCE | {"type": "Delta"}, "prepare": PREPARE}),
        "type InferenceTable requires feedback, and the other types forbid it",
    ),
    "no place": (
        job(data={"source": {"type": "InferenceTable", "feedback": FEEDBACK}, "prepare": PREPARE}),
        "the other types require path, or table instead for Delta, Parquet and InferenceTable",
    ),
    "a mix": (
        job(data={"source": {"type": "Mix", "sources": [SOURCE | {"name": "a"}]}, "prepare": PREPARE}),
        'type: Unsupported value: "InferenceTable"',
    ),
    "feedback in two places": (served({"table": "a.b.c"}), "set exactly one of path and table"),
    "feedback on a server": (served({"path": "https://feedback"}), "path must be s3://bucket/folder"),
    "two versions of the feedback": (
        served({"version": 1, "versionTime": "2026-11-01T00:00:00Z"}),
        "set version or versionTime, not both",
    ),
    "no id": (served({"requestIdColumn": None}), "feedback.requestIdColumn: Required value"),
    "nothing to learn from": (
        served({"ratingColumn": None}),
        "set ratingColumn, correctionColumn, or both",
    ),
    "a least rating without ratings": (
        served({"ratingColumn": None, "correctionColumn": "better", "minRating": 4}),
        "minRating requires ratingColumn",
    ),
    "columns of text": (served(columns={"type": "Text"}), NO_COLUMNS),
    "columns with other names": (served(columns={"type": "Messages", "messages": "chat"}), NO_COLUMNS),
    "tools": (served(columns={"type": "Messages", "tools": "tools"}), NO_COLUMNS),
    "columns of another objective": (
        served(columns={"type": "Messages"}, objective=DPO),
        "requires data.columns.type Preference",
    ),
    "a template": (served(prepare={"promptTemplate": "{prompt}"}), CONVERSATIONS),
    "turns": (served(prepare={"conversation": {}}), CONVERSATIONS),
    "a failing template": (served(prepare={"onTemplateError": "Fail"}), CONVERSATIONS),
    "no preparation": (job(data={"source": SOURCE}), CONVERSATIONS),
    "a loss on everything": (
        served(objective={"type": "SFT", "lossOn": "All"}),
        "or when data.source.type is InferenceTable, whose earlier answers have no feedback",
    ),
    "output over the feedback": (
        served(prepare={"output": "s3://lake/feedback"}),
        "prepare.output must not be the path of a source",
    ),
    "a local path of a run": (
        served({"path": "/feedback"}, prepare=on_databricks()),
        "source.path must not be a local path when prepare.spark.mode is Databricks",
    ),
    "a short name in a catalog": (
        served({"table": "feedback"}, source=TABLES, prepare={"catalog": UNITY}),
        "table must be catalog.schema.table",
    ),
}
ACCEPTED: dict[str, Json] = {
    "paths": served({"version": 3}),
    "local paths": served({"path": "/feedback"}, source=SOURCE | {"path": "/logged"}),
    "tables of a run": served(source=TABLES, prepare=on_databricks(), model={"base": "org/base"}),
    "tables of a catalog": served(source=TABLES, prepare={"catalog": UNITY}),
    "a table of a catalog beside a path": served(
        {"table": "main.llm.feedback", "path": None}, prepare={"catalog": UNITY}
    ),
    "all columns": served(
        {
            "loggedIdColumn": "client_request_id",
            "minRating": 4,
            "correctionColumn": "better",
            "timeColumn": "at",
            "versionTime": "2026-11-01T00:00:00Z",
        }
    ),
    "conversations": served(columns={"type": "Messages"}),
    "pairs": served(columns={"type": "Preference", "chosen": "chosen"}, objective=DPO),
    "labels": served(objective=KTO),
    "an answer's loss": served(objective={"type": "SFT", "lossOn": "LastAnswer"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
