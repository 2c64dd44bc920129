"""Which preparations are the same."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds import FineTuneJobSpec
from finetune_crds.preparation import settings_digest

Json = dict[str, Any]
SOURCE: Json = {"type": "Delta", "path": "/data/corpus"}
EVALUATION: Json = {"name": "tasks", "type": "Hub", "dataset": "org/tasks"}
PREPARE: Json = {"minChars": 10, "decontaminate": {"sources": [EVALUATION]}}
WORK: Json = {"volume": "/Volumes/a/b/c", "compute": {"type": "Serverless"}}
DATABRICKS: Json = {"mode": "Databricks", "databricks": WORK}
TABLE: Json = {"type": "Delta", "table": "support.chats"}
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://a:9083"}}
MIX: Json = {"type": "Mix", "sources": [{"name": "a", **SOURCE}]}


def digest(**parts: Any) -> str:
    """The digest of a job; `source`, `columns` and `prepare` are parts of its data."""
    data = {"source": SOURCE, "prepare": PREPARE}
    data |= {name: parts.pop(name) for name in ("source", "columns") if name in parts}
    data["prepare"] = PREPARE | parts.pop("prepare", {})
    spec = FineTuneJobSpec.model_validate({"model": {"base": "org/base"}, "data": data, **parts})
    assert spec.data
    assert spec.model
    return settings_digest(spec.data, spec.model, spec.objective)


def evaluation(**fields: Any) -> Json:
    return {"decontaminate": {"sources": [EVALUATION | fields]}}


# Parts of a job with which its preparation stays the same, and with which it is another one.
SAME: dict[str, Json] = {
    "another table": {"prepare": {"output": "/elsewhere"}},
    "tables for the splits": {"prepare": {"splitTables": {"train": "main.support.chat_train"}}},
    "tables for the splits, with their catalog": {"prepare": {"splitTables": {"train": "support.chat_train"}, "catalog": HIVE}},
    "a table of its own": {"prepare": {"reuse": "Never"}},
    "more samples in the report": {"prepare": {"reportSamples": 20}},
    "executors": {"prepare": {"spark": {"mode": "Kubernetes", "executors": 4}}},
    "a SparkApplication": {"prepare": {"spark": {"mode": "SparkApplication"}}},
    "another shuffle": {"prepare": {"spark": {"conf": {"spark.sql.shuffle.partitions": "7"}}}},
    "a default written out": {"prepare": {"splitRatios": {"seed": 42}, "dedupe": {"exact": True}}},
    "a version": {"source": SOURCE | {"version": 3}},
    "a version by its time": {"source": SOURCE | {"versionTime": "2026-08-01T12:00:00Z"}},
    "a revision of an evaluation set": {"prepare": evaluation(revision="main")},
    "a cache of models": {"model": {"base": "org/base", "cache": {"claimName": "models"}}},
    "an adapter that goes on": {"model": {"base": "org/base", "adapter": "Continue"}},
    "another training": {"training": {"maxSteps": 5}, "method": {"type": "LoRA"}},
    "another objective on the same examples": {"objective": {"lossOn": "All"}},
}  # fmt: skip
OTHER: dict[str, Json] = {
    "another source": {"source": SOURCE | {"path": "/data/other"}},
    "another type of source": {"source": SOURCE | {"type": "Parquet"}},
    "a mix": {"source": MIX},
    "a mix with another weight": {"source": {"type": "Mix", "sources": [{"name": "a", "weight": 2, **SOURCE}]}},
    "columns": {"columns": {"type": "Text"}},
    "another step": {"prepare": {"maxTokens": 100}},
    "new tokens": {"model": {"base": "org/base", "newTokens": ["<tool>"]}},
    "a filter": {"prepare": {"filter": "stars > 4"}},
    "another seed": {"prepare": {"splitRatios": {"seed": 43}}},
    "another evaluation set": {"prepare": evaluation(dataset="org/others")},
    "other runs of words": {"prepare": {"decontaminate": {"sources": [EVALUATION], "ngram": 8}}},
    "another time zone": {"prepare": {"spark": {"conf": {"spark.sql.session.timeZone": "Europe/Berlin"}}}},
    "another way to read files": {"prepare": {"spark": {"conf": {"spark.sql.files.ignoreCorruptFiles": "true"}}}},
    "a workspace": {"prepare": {"spark": DATABRICKS}},
    "another workspace": {"prepare": {"spark": DATABRICKS | {"databricks": WORK | {"secretRef": {"name": "other"}}}}},
    "tools": {"columns": {"type": "Messages", "tools": "functions"}},
    "no tools": {"columns": {"type": "Messages"}},
    "Jinja": {"prepare": {"templateSyntax": "Jinja", "promptTemplate": "{{ a }}"}},
    "no Jinja": {"prepare": {"promptTemplate": "{{ a }}"}},
    "another tokenizer": {"model": {"base": "org/other"}},
    "another revision of the tokenizer": {"model": {"base": "org/base", "revision": "v2"}},
    "another chat template": {"model": {"base": "org/base", "chatTemplate": {"type": "ChatML"}}},
    "code of the tokenizer": {"model": {"base": "org/base", "trustRemoteCode": True}},
    "columns that are found in another way": {"objective": {"type": "DPO"}},
}  # fmt: skip


@pytest.mark.parametrize("parts", SAME.values(), ids=SAME)
def test_the_same_rows(parts: Json) -> None:
    assert digest(**parts) == digest()


@pytest.mark.parametrize("parts", OTHER.values(), ids=OTHER)
def test_other_rows(parts: Json) -> None:
    assert digest(**parts) != digest()


def test_every_difference_counts() -> None:
    assert len({digest(**parts) for parts in OTHER.values()}) == len(OTHER)


def test_versions_of_a_source_in_a_mix_do_not_count() -> None:
    pinned = {"type": "Mix", "sources": [{"name": "a", **SOURCE, "version": 3}]}
    assert digest(source=pinned) == digest(source=MIX)


def test_versions_of_feedback_do_not_count() -> None:
    feedback = {"path": "/feedback", "requestIdColumn": "id", "ratingColumn": "thumb"}
    source = SOURCE | {"type": "InferenceTable", "feedback": feedback}
    later = {"version": 3, "versionTime": "2026-08-01T12:00:00Z"}
    assert digest(source=source) == digest(source=source | {"feedback": feedback | later})
    assert digest(source=source) != digest(source=source | {"feedback": feedback | {"ratingColumn": "stars"}})


VERSIONS = [
    "models:/ml.prod.assistant@champion",
    "models:/ml.prod.assistant@candidate",
    "models:/ml.prod.assistant/7",
]
FOLDERS = ["models:/ml.prod.assistant/7/model", "models:/ml.prod.assistant/8/model"]
# Other models, or other parts of a version.
OTHER_MODELS = ["models:/ml.prod.helper/7", FOLDERS[0], "models:/m-0123456789abcdef", "/models/7"]


def test_versions_of_a_registered_model_do_not_count() -> None:
    """The digest of the rows has the content of the tokenizer, which is usually that of the version before."""
    for bases in (VERSIONS, FOLDERS):
        assert len({digest(model={"base": base}) for base in bases}) == 1
    assert len({digest(model={"base": base}) for base in [VERSIONS[0], *OTHER_MODELS]}) == 1 + len(
        OTHER_MODELS
    )


def test_the_token_of_a_server_does_not_count() -> None:
    server = {"uri": "http://unity:8080"}

    def of(server: Json) -> str:
        return digest(source=TABLE, prepare={"catalog": {"type": "UnityCatalog", "unityCatalog": server}})

    assert of(server) == of(server | {"secretRef": {"name": "unity"}}) != of({"uri": "http://other:8080"})


def test_objectives_with_the_same_columns_share_their_preparation() -> None:
    found = {name: digest(objective={"type": name}) for name in ("SFT", "DPO", "ORPO", "SimPO", "KTO")}
    assert found["DPO"] == found["ORPO"] == found["SimPO"]
    assert len({*found.values()}) == 3


def test_the_objective_does_not_count_where_columns_are_named() -> None:
    columns = {"type": "Preference"}
    assert digest(columns=columns, objective={"type": "DPO"}) == digest(columns=columns)


def test_the_digest_survives_versions() -> None:
    # A change here makes every table that was ever prepared one that no job uses again.
    assert digest() == "de55ab17a90e"


READING_TABLES: dict[str, Json] = {
    "a source": {"source": TABLE},
    "a source of a mix": {"source": {"type": "Mix", "sources": [{"name": "a", **TABLE}]}},
    "an evaluation set": {"prepare": {"decontaminate": {"sources": [{"name": "tasks", **TABLE}]}}},
}


@pytest.mark.parametrize("parts", READING_TABLES.values(), ids=READING_TABLES)
def test_the_catalog_of_tables_that_are_read_counts(parts: Json) -> None:
    catalogs: list[Json] = [{}, {"catalog": {"type": "Databricks"}}, {"catalog": HIVE}]
    digests = {digest(**parts | {"prepare": parts.get("prepare", {}) | catalog}) for catalog in catalogs}
    assert len(digests) == len(catalogs)
