"""Examples of an inference table and its feedback: which answers stay, what becomes of them, and why others are left out."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from finetune_crds.data import Columns
from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.source import reader
from finetune_trainer.prep.source.inference_table import REASONS
from finetune_trainer.prep.spark import session
from unit.trainer.prep.recipes import Json, Preparer, table_of
from unit.trainer.prep.source.test_logged_exchange import CALL, CHUNKS, answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

MAIL = "jane@example.com"
LOGGED = pa.schema(
    {
        "databricks_request_id": pa.string(),
        "client_request_id": pa.string(),
        "request_time": pa.timestamp("us", "UTC"),
        "status_code": pa.int32(),
        "request": pa.string(),
        "response": pa.string(),
        "logging_error_codes": pa.list_(pa.string()),
        "served_entity_id": pa.string(),
    }
)
FEEDBACK = pa.schema({"id": pa.string(), "stars": pa.string(), "better": pa.string(), "at": pa.int64()})


class Case(NamedTuple):
    """A request, the feedback on it, and the reason why it is no example of each kind; None for an example.

    logged: columns of the inference table, if they are not those of a good answer. feedback: rating, correction and time of each.
    surplus: the reason of the feedback that does not count, and its number.
    """

    feedback: list[tuple[str | None, str | None, int | None]]
    sft: str | None = None
    dpo: str | None = None
    kto: str | None = None
    logged: Json | None = None
    surplus: tuple[str, int] = ("severalFeedbacks", 0)


def left_out(reason: str, *feedback: tuple[str | None, str | None, int | None], **logged: Any) -> Case:
    """A case that is no example of any kind."""
    return Case(list(feedback) or [GOOD], reason, reason, reason, logged)


GOOD, BAD, CORRECTED = ("5", None, 1), ("1.0", None, 1), (None, "Until five.", 1)
CHAT: Json = {
    "messages": [
        {"role": "user", "content": f"I am {MAIL}"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Open today?"},
    ]
}
CASES: dict[str, Case] = {
    "liked": Case([GOOD], dpo="noCorrection"),
    "disliked": Case([BAD], sft="noCorrection", dpo="noCorrection"),
    "disliked and corrected": Case([("2", "From nine to five.", 1)]),
    "corrected without a rating": Case([CORRECTED]),
    "corrected with the same text": Case([(None, " Yes. ", 1)], dpo="noCorrection"),
    "streamed": Case([GOOD], dpo="noCorrection", logged={"response": json.dumps(CHUNKS)}),
    "liked, later corrected": Case([GOOD, (None, "No.", 2), ("x", None, 3)], surplus=("severalFeedbacks", 1)),
    "the same feedback twice": Case([GOOD, GOOD], dpo="noCorrection", surplus=("severalFeedbacks", 1)),
    "liked and disliked at once": left_out("severalFeedbacks", GOOD, BAD)._replace(
        surplus=("severalFeedbacks", 1)
    ),
    "cut off": Case(
        [GOOD],
        "unfinished",
        "noCorrection",
        "unfinished",
        {"response": json.dumps(answer(finish_reason="length"))},
    ),
    "cut off and corrected": Case(
        [CORRECTED], logged={"response": json.dumps(answer(finish_reason="length"))}
    ),
    "empty": left_out("emptyAnswer", response=json.dumps(answer(" ")))._replace(dpo="noCorrection"),
    "empty and corrected": Case(
        [CORRECTED], None, "emptyAnswer", "emptyAnswer", {"response": json.dumps(answer(""))}
    ),
    "no feedback": Case([], "noFeedback", "noFeedback", "noFeedback"),
    "feedback without content": left_out("noFeedback", ("NaN", " ", 1), (None, None, 1)),
    "no id": Case([], "noFeedback", "noFeedback", "noFeedback", {"databricks_request_id": None}),
    "failed": left_out("status", CORRECTED, status_code=400, response='{"error_code": "BAD_REQUEST"}'),
    "no status": left_out("status", CORRECTED, status_code=None),
    "too large": left_out("truncated", CORRECTED, logging_error_codes=["MAX_REQUEST_SIZE_EXCEEDED"]),
    "nothing logged": left_out("truncated", CORRECTED, response=None),
    "not JSON": left_out("unreadable", CORRECTED, response='{"choices": ['),
    "embeddings": left_out("unknownShape", CORRECTED, request='{"input": "hi"}'),
    "two answers": left_out(
        "severalAnswers", CORRECTED, response=json.dumps({"choices": answer()["choices"] * 2})
    ),
    "a tool is called": left_out(
        "toolCalls", CORRECTED, response=json.dumps(answer(message={"tool_calls": CALL}))
    ),
    "an image": left_out(
        "notText",
        CORRECTED,
        request=json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ),
}
UNKNOWN = 3  # feedback on requests that are not logged


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The two tables: each case is one request, named after its case."""
    folder = tmp_path_factory.mktemp("serving")
    requests, feedback = [], []
    for name, case in CASES.items():
        request = json.dumps(CHAT | {"user": name})
        row = {
            "databricks_request_id": name,
            "client_request_id": "one for all",
            "request_time": datetime(2026, 11, 1, tzinfo=UTC),
            "status_code": 200,
            "request": request,
            "response": json.dumps(answer("Yes.")),
            "logging_error_codes": [],
            "served_entity_id": name,
        }
        requests.append(row | (case.logged or {}))
        feedback += [
            {"id": name, "stars": stars, "better": better, "at": at} for stars, better, at in case.feedback
        ]
    repeated = {name: requests[0][name] for name in LOGGED.names} | {"databricks_request_id": "repeated"}
    requests += [repeated, repeated | {"request": '{"prompt": "Another?"}'}]
    feedback += [{"id": id_, "stars": "5"} for id_ in ("repeated", "away", "away", None)]
    write_deltalake(folder / "logged", pa.Table.from_pylist(requests, LOGGED))
    write_deltalake(folder / "feedback", pa.Table.from_pylist(feedback, FEEDBACK))
    return folder / "logged", folder / "feedback"


def source(tables: tuple[Path, Path], **feedback: Any) -> Json:
    columns = {
        "requestIdColumn": "id",
        "ratingColumn": "stars",
        "minRating": 4,
        "correctionColumn": "better",
        "timeColumn": "at",
    }
    logged, feedback_table = map(str, tables)
    return {
        "type": "InferenceTable",
        "path": logged,
        "feedback": {"path": feedback_table, **columns, **feedback},
    }


def count(kind: str) -> dict[str, int]:
    """Count the reasons of the cases for one kind of example, in the order of the steps."""
    reasons: Counter[str] = Counter({"repeatedRequest": 2, "unknownRequest": UNKNOWN})
    for case in CASES.values():
        reason, (surplus, number) = getattr(case, kind), case.surplus
        reasons[surplus] += number
        reasons.update([reason] if reason else [])
    # Examples of different cases may be equal.
    return {reason: reasons[reason] for reason in REASONS} | {"notNull": 0, "onTemplateError": 0}


def said(role: str, content: str, **fields: Any) -> Json:
    return {"role": role, "content": content, **fields}


OTHERS: Json = {"columns": None, "onTemplateError": "Drop", "dedupe": {"exact": False}}
ASKED = [said("user", "I am <EMAIL>"), said("assistant", "Hello."), said("user", "Open today?")]
WEIGHED = [
    said("user", "I am <EMAIL>", weight=None),
    said("assistant", "Hello.", weight="0"),
    said("user", "Open today?", weight=None),
]
STREAMED = "Ye\u2028s."
CORRECTIONS = {
    "disliked and corrected": "From nine to five.",
    "corrected without a rating": "Until five.",
    "liked, later corrected": "No.",
    "cut off and corrected": "Until five.",
}
EXAMPLES: dict[str, tuple[str, Columns, list[Json]]] = {
    "SFT": (
        "sft",
        Columns(type="Messages"),
        [
            {"messages": [*WEIGHED, said("assistant", text, weight=None)]}
            for text in ["Yes.", " Yes. ", STREAMED, "Yes.", *CORRECTIONS.values(), "Until five."]
        ],
    ),
    "DPO": (
        "dpo",
        Columns(type="Preference"),
        [
            {"prompt": ASKED, "chosen": [said("assistant", text)], "rejected": [said("assistant", "Yes.")]}
            for text in CORRECTIONS.values()
        ],
    ),
    "KTO": (
        "kto",
        Columns(type="Unpaired"),
        [
            {"prompt": ASKED, "completion": [said("assistant", text)], "label": label}
            for text, label in [
                *[("Yes.", True)] * 2,
                (STREAMED, True),
                *[("Yes.", False)] * (len(CORRECTIONS) + 2),
            ]
        ],
    ),
}


@pytest.mark.parametrize("objective", EXAMPLES)
def test_answers_become_examples_or_have_a_reason(
    prepare: Preparer, tables: tuple[Path, Path], objective: str
) -> None:
    kind, columns, examples = EXAMPLES[objective]
    result = prepare(
        [{}],
        source=source(tables),
        objective={"type": objective},
        redact=["Email"],
        reportSamples=3,
        **OTHERS,
    )
    names = [*columns.column_names]
    rows = [{name: row[name] for name in names} for row in table_of(result)]
    assert sorted(rows, key=str) == sorted(examples, key=str)
    assert result.dropped == count(kind)
    assert (result.source_version, result.feedback_version, result.columns) == (0, 0, columns)
    # The rows that are left out have not been redacted, so the report shows none of them.
    assert prepare.shown[0].samples == {}
    assert prepare.shown[0].dropped == result.dropped


def test_rows_can_be_filtered_and_the_report_shows_what_is_left_out(
    prepare: Preparer, tables: tuple[Path, Path]
) -> None:
    result = prepare(
        [{}],
        source=source(tables),
        filter="served_entity_id IN ('liked', 'streamed') AND request_time > '2026-10-01'",
        reportSamples=1,
        **OTHERS,
    )
    samples = prepare.shown[0].samples
    assert (result.rows.train, result.dropped["filter"]) == (2, 7)
    assert samples["unreadable"] == [f'{json.dumps(CHAT | {"user": "not JSON"})}\n{{"choices": [']
    assert [*samples] == [
        name for name, number in result.dropped.items() if number and name != "unknownRequest"
    ]


MISSING: dict[str, tuple[Json, str, str]] = {
    "a column of feedback": (
        {"ratingColumn": "thumb"},
        "MissingColumn",
        "the table of data.source.feedback has no column thumb, it has at, better, id and stars: name its columns in "
        "data.source.feedback",
    ),
    "a column of requests": (
        {"loggedIdColumn": "trace_id"},
        "MissingColumn",
        "the table of data.source has no column trace_id, it has ",
    ),
    "a correction that is a number": (
        {"correctionColumn": "at"},
        "WrongColumnType",
        "column at of data.source.feedback holds bigint: it must be string",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_column_is_named(prepare: Preparer, tables: tuple[Path, Path], case: str) -> None:
    changes, reason, message = MISSING[case]
    with pytest.raises(DataError) as failure:
        prepare([{}], source=source(tables, **changes), **OTHERS)
    assert failure.value.reason == reason
    assert str(failure.value).startswith(message)


@pytest.fixture
def gateway(spark: SparkSession, tmp_path: Path, tables: tuple[Path, Path]) -> Iterator[tuple[Path, Path]]:
    """The same requests as the Unity AI Gateway logs them, and other feedback in two versions; both tables also have names."""
    renamed = {"databricks_request_id": "request_id", "request_time": "event_time"}
    names = [renamed.get(name, name) for name in LOGGED.names]
    logged = DeltaTable(tables[0]).to_pyarrow_table().rename_columns(names)
    write_deltalake(tmp_path / "logged", logged.drop_columns(["client_request_id"]))
    feedback_table = pa.table({"id": ["liked", "disliked"], "thumb": [True, False]})
    write_deltalake(tmp_path / "feedback", feedback_table)
    write_deltalake(tmp_path / "feedback", feedback_table.slice(0, 1), mode="overwrite")
    for name in ("logged", "feedback"):
        spark.sql(f"CREATE TABLE {name} USING delta LOCATION '{tmp_path / name}'")
    yield tmp_path / "logged", tmp_path / "feedback"
    for name in ("logged", "feedback"):
        spark.sql(f"DROP TABLE {name}")


def test_tables_of_the_gateway_on_databricks_by_name(
    prepare: Preparer, gateway: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(session.ENV_RUNTIME, "17.3")
    feedback = {"table": "default.feedback", "requestIdColumn": "id", "ratingColumn": "thumb", "version": 0}
    by_name = {"type": "InferenceTable", "table": "default.logged", "feedback": feedback}
    result = prepare([{}], source=by_name, **OTHERS)
    dropped = {reason: result.dropped[reason] for reason in ("unknownRequest", "noFeedback", "noCorrection")}
    # One request was liked, and one disliked.
    assert dropped == {"unknownRequest": 0, "noFeedback": len(CASES) + 2 - 2, "noCorrection": 1}
    assert (result.rows.train, result.source_version, result.feedback_version) == (1, 0, 0)


def test_the_identity_has_the_requests_with_feedback_and_the_version_of_the_feedback(
    spark: SparkSession, gateway: tuple[Path, Path], tmp_path: Path
) -> None:
    logged, feedback_table = (str(path) for path in gateway)
    columns = {"path": feedback_table, "requestIdColumn": "id", "ratingColumn": "thumb"}
    source = {"type": "InferenceTable", "path": logged, "feedback": columns}

    def identify(**feedback: int) -> tuple[str, ...]:
        changed = source | {"feedback": columns | feedback}
        return tuple(reader.read(spark, Source.model_validate(changed), tmp_path).identity.split())

    ids = [str(DeltaTable(path).metadata().id) for path in (logged, feedback_table)]
    first, newest = identify(version=0), identify()
    assert [part.partition("@")[0] for part in first] == [part.partition("@")[0] for part in newest] == ids
    assert [part.partition("@")[2] for part in (first[1], newest[1])] == ["0", "1"]
    # The endpoint answers all the time, and an answer without feedback is no example.
    requests = DeltaTable(logged).to_pyarrow_table()
    position = requests.schema.get_field_index("request_id")

    def log(name: str) -> None:
        row = requests.slice(0, 1).set_column(position, "request_id", pa.array([name]))
        write_deltalake(logged, row, mode="append")

    log("nobody rated this")
    assert identify() == newest
    log("liked")
    assert identify()[0] != newest[0]
