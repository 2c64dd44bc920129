"""What the API server refuses and accepts of a job's data: sources, columns, preparations."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import DPO, UNITY, prepared
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]


def source(**fields: Any) -> Json:
    """A job whose data.source has these fields."""
    return job(data=prepared() | {"source": fields})


def mixed(**fields: Any) -> Json:
    """A mix of two sources, with fields of the first replaced; None removes one."""
    first = {"name": "a", "type": "CSV", "path": "/mixed/csv", **fields}
    second = {"name": "b", "type": "Delta", "path": "/mixed/delta", "version": 3, "weight": 2.5}
    return {
        "type": "Mix",
        "sources": [{name: value for name, value in first.items() if value is not None}, second],
    }


def decontaminate(*changes: Json, **fields: Any) -> Json:
    """Fields of prepare: an evaluation set for each of some changes to a good one, in which None removes a field."""
    good = {"name": "a", "type": "Delta", "path": "/data/tasks"}
    sets = [
        {name: value for name, value in (good | change).items() if value is not None} for change in changes
    ]
    return {"decontaminate": {"sources": sets, **fields}}


def without_columns(**fields: Any) -> Json:
    """spec.data without columns, and with fields of prepare replaced."""
    return {name: part for name, part in prepared(**fields).items() if name != "columns"}


def on_executors(path: str, output: str, **fields: Any) -> Json:
    """spec.data of a preparation whose executors are pods of their own."""
    prepare = {"output": output, "spark": {"mode": "Kubernetes"}, **fields}
    return {"source": {"type": "Parquet", "path": path}, "prepare": prepare}


NAMED: Json = {"type": "Delta", "table": "support.chats"}
RUN: Json = {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}
WORKSPACE: Json = {"uri": "databricks", "experiment": "/Shared/a"}
NAMES = "type Tables requires names of tables: catalog.schema.table, or catalog.schema.table@v3 for version 3"


def in_tables(**names: Any) -> Json:
    """spec.data with tables of splits; None removes one."""
    splits = {"type": "Tables", "train": "main.support.chat_train", **names}
    return {
        "columns": {"type": "Text"},
        "splits": {name: value for name, value in splits.items() if value is not None},
    }


UNSAVED = "splitTables requires spark.mode Databricks and names like catalog.schema.table, or catalog.type Hive and names like database.table"


def saved(train: str, **tables: str) -> Json:
    """Fields of prepare."""
    return {"splitTables": {"train": train, **tables}}


REFUSED: dict[str, tuple[Json, str]] = {
    "a source in a store that cannot be read": (
        source(type="Delta", path="wasbs://c@a.blob.core.windows.net/corpus"),
        "path must be s3://bucket/folder, gs://bucket/folder, abfss://container@host/folder, or an absolute path",
    ),
    "an output that training cannot read": (
        job(data=prepared(output="hdfs://splits/support")),
        "output must be s3://bucket/folder, gs://bucket/folder, abfss://container@host/folder, or an absolute path",
    ),
    "a catalog, and no table": (
        job(data=prepared(catalog=UNITY)),
        "prepare.catalog applies only to sources with table, and to splitTables: set table in a source, or remove prepare.catalog",
    ),
    **{
        f"split tables: {case}": (job(data=prepared(**fields)), sentence)
        for case, fields, sentence in (
            ("Unity Catalog", {"catalog": UNITY} | saved("a.b.c"), UNSAVED),
            (
                "two names in a Databricks run",
                {"output": "s3://b/a", "spark": RUN} | saved("a.b.c", test="a.b"),
                UNSAVED,
            ),
            ("three names in Hive", {"catalog": HIVE} | saved("a.b.c"), UNSAVED),
            ("three names of the last one", {"catalog": HIVE} | saved("a.b", test="a.b.c"), UNSAVED),
            (
                "one table for two",
                saved("a.b", test="a.b"),
                "train, validation and test must be different tables",
            ),
            (
                "one table for the last two",
                saved("a.b", validation="a.c", test="a.c"),
                "train, validation and test must be different tables",
            ),
            ("no name of a table", saved("chats"), "in body should match"),
            ("a version", saved("a.b@v3"), "in body should match"),
        )
    },
    **{
        f"the table {table} in {catalog['type']}": (
            job(data=prepared(catalog=catalog) | {"source": {"type": "Delta", "table": table}}),
            "table must be catalog.schema.table, or database.table when prepare.catalog.type is Hive",
        )
        for table, catalog in (
            ("chats", UNITY),
            ("support.chats", UNITY),
            ("a.b.c.d", UNITY),
            ("a.b.c", HIVE),
        )
    },
    "a table of an evaluation set in a Hive metastore": (
        job(
            data=prepared(
                catalog=HIVE, **decontaminate({"path": None, "table": "a.b.c"}, {"name": "b", "path": "/b"})
            )
        ),
        "table must be catalog.schema.table, or database.table when prepare.catalog.type is Hive",
    ),
    "a catalog without its server": (
        job(data=prepared(catalog={"type": "UnityCatalog"}) | {"source": NAMED}),
        "type UnityCatalog requires unityCatalog",
    ),
    "a password in the address of a catalog": (
        job(
            data=prepared(catalog={"type": "UnityCatalog", "unityCatalog": {"uri": "http://me:word@unity"}})
            | {"source": NAMED}
        ),
        "uri must be an http or https address without credentials: put a token into the Secret of secretRef",
    ),
    "a Hive metastore of another protocol": (
        job(data=prepared(catalog={"type": "Hive", "hive": {"uri": "http://metastore"}}) | {"source": NAMED}),
        "uri must be thrift://host:port; separate several replicas with commas",
    ),
    "split does not add up": (
        job(data=prepared(splitRatios={"train": 0.8, "validation": 0.1, "test": 0.2})),
        "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
    ),
    "files of the test split beside a table": (
        job(data={"splits": {"type": "Delta", "path": "/x", "test": "/y"}}),
        "type Delta requires path and allows version; the other types require train and allow validation and test",
    ),
    **{
        f"splits in a workspace: {field}": (
            job(data={"splits": splits, "columns": {"type": "Text"}}),
            (
                "the training pods cannot read /Volumes or dbfs:/ of a Databricks workspace: put the splits in an object "
                "store"
            ),
        )
        for field, splits in {
            "path": {"type": "Delta", "path": "/Volumes/a/b/c/splits"},
            "train": {"type": "Parquet", "train": "dbfs:/splits"},
            "test": {"type": "Parquet", "train": "/x", "test": "/dbfs/splits"},
        }.items()
    },
    **{
        f"splits in tables: {case}": (job(data=in_tables(**names), tracking=tracking), sentence)
        for case, names, tracking, sentence in (
            (
                "no table of training",
                {"train": None, "test": "a.b.c"},
                WORKSPACE,
                "the other types require train",
            ),
            ("one version for all", {"version": 3}, WORKSPACE, "type Delta requires path and allows version"),
            ("two names", {"train": "b.c"}, WORKSPACE, NAMES),
            ("a folder", {"validation": "s3://b/validation"}, WORKSPACE, NAMES),
            ("no number of a version", {"test": "a.b.c@latest"}, WORKSPACE, NAMES),
            (
                "no workspace",
                {},
                {},
                "data.splits.type Tables, and a folder in /Volumes as output.uri, checkpoint.uri or checkpoint.resumeFrom.uri, require the Databricks login of spec.tracking: set tracking.uri to databricks",
            ),
        )
    },
    "source and splits": (
        job(data={**prepared(), "splits": {"type": "Delta", "path": "/x"}}),
        "set exactly one of source and splits",
    ),
    "no type of columns": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"prompt": "p"}}),
        "spec.data.columns.type: Required value",
    ),
    "a column of another type": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"type": "Text", "prompt": "p"}}),
        "prompt can be set only when type is PromptResponse, Preference or Unpaired",
    ),
    "a preparation of splits": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "prepare": {"output": "/y"}}),
        "prepare can be set only when source is set",
    ),
    "weights of a text's messages": (
        job(data=prepared(columns={"type": "Text", "messageWeight": "train"})),
        "messageWeight, messages and tools can be set only when type is Messages",
    ),
    "a template of conversations": (
        job(data=prepared(columns={"type": "Messages", "messages": "m"}, promptTemplate="{m}")),
        "prepare.promptTemplate must not be set when columns.type is Messages",
    ),
    **{
        f"a source: {what}": (source(**fields), sentence)
        for what, fields, sentence in (
            (
                "a table of files",
                {"type": "CSV", "table": "a.b"},
                "the other types require path, or table instead for Delta, Parquet and InferenceTable",
            ),
            (
                "a version of files",
                {"type": "CSV", "path": "/a", "version": 1},
                "version and versionTime can be set only when type is Delta or InferenceTable",
            ),
            (
                "a time of files",
                {"type": "Parquet", "path": "/a", "versionTime": "2026-11-01T00:00:00Z"},
                "version and versionTime can be set only when type is Delta or InferenceTable",
            ),
            (
                "two versions",
                {"type": "Delta", "path": "/a", "version": 1, "versionTime": "2026-11-01T00:00:00Z"},
                "can be set only when type is Delta or InferenceTable, and only one of them",
            ),
            (
                "a time that is none",
                {"type": "Delta", "path": "/a", "versionTime": "yesterday"},
                "spec.data.source.versionTime: Invalid value",
            ),
            ("a path of the Hub", {"type": "Hub", "path": "/a"}, "type Hub requires dataset"),
            (
                "a split of files",
                {"type": "JSONLines", "path": "/a", "split": "train"},
                "type Hub requires dataset, and allows config, split and revision",
            ),
        )
    },
    **{
        f"a mix: {what}": (job(data=prepared(**fields) | {"source": mix}), sentence)
        for what, mix, fields, sentence in (
            ("no sources", {"type": "Mix"}, {}, "type Mix requires sources"),
            ("a path", mixed() | {"path": "/a"}, {}, "type Mix requires sources"),
            ("sources of files", mixed() | {"type": "CSV", "path": "/a"}, {}, "type Mix requires sources"),
            ("a source that is nowhere", mixed(path=None), {}, "type Hub requires dataset"),
            ("a weight of nothing", mixed(weight=0), {}, "weight: Invalid value: 0"),
            (
                "output over a source",
                mixed(),
                {"output": "/mixed/csv"},
                "prepare.output must not be the path of a source: set another folder",
            ),
            (
                "an evaluation set of its own",
                mixed(),
                decontaminate({"path": "/mixed/csv"}),
                "prepare.decontaminate.sources must not include the source: every example would be dropped",
            ),
            (
                "a data set of the Hub in executor pods",
                mixed(type="Hub", path=None, dataset="org/name"),
                {"spark": {"mode": "Kubernetes"}},
                "source.type Hub requires prepare.spark.mode Local, which downloads the data set into the prep pod",
            ),
        )
    },
    "an older version of the source as an evaluation set": (
        job(
            data={
                "source": NAMED,
                "prepare": {
                    "output": "/y",
                    **decontaminate({"path": None, "table": "support.chats", "version": 3}),
                },
            }
        ),
        "every example would be dropped",
    ),
    "columns of duplicates that stay": (
        job(data=prepared(dedupe={"exact": False, "columns": ["a"]})),
        "dedupe.columns and dedupe.near require dedupe.exact true, and must not both be set",
    ),
    "the prompt of a text": (
        job(data=prepared(minPromptChars=1)),
        (
            "prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is PromptResponse, Preference or Unpaired"
        ),
    ),
    "turns of a text": (
        job(data=prepared(conversation={})),
        "prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is PromptResponse, Preference or Unpaired",
    ),
    "texts that no chat template renders": (
        job(data=prepared(onTemplateError="Drop")),
        "prepare.onTemplateError Drop requires a template that can fail",
    ),
    "Jinja without a template": (
        job(data=prepared(templateSyntax="Jinja")),
        "responseTemplate and templateSyntax Jinja require promptTemplate",
    ),
    "tools of a text": (
        job(data=prepared(columns={"type": "Text", "tools": "t"})),
        "messageWeight, messages and tools can be set only when type is Messages",
    ),
    "limits of the prompt in the wrong order": (
        job(data=without_columns(minPromptChars=3, maxPromptChars=2)),
        "minPromptChars must not be above maxPromptChars",
    ),
    "a language that is not known": (
        job(data=prepared(languages=["english"])),
        'spec.data.prepare.languages[0]: Unsupported value: "english"',
    ),
    "a kind that nothing finds": (
        job(data=prepared(redact=["Email", "Name"])),
        'spec.data.prepare.redact[1]: Unsupported value: "Name"',
    ),
    **{
        f"evaluation sets: {what}": (job(data=prepared(**fields)), sentence)
        for what, fields, sentence in (
            ("none", decontaminate(), "should have at least 1 items"),
            ("nowhere", decontaminate({"path": None}), "type Hub requires dataset"),
            ("twice", decontaminate({}, {}), "Duplicate value"),
            ("the source", decontaminate({"path": "/data/corpus"}), "every example would be dropped"),
            (
                "the output",
                decontaminate({"path": "/data/out"}) | {"output": "/data/out"},
                "must not include output",
            ),
            ("a run of words that is none", decontaminate({}, ngram=4), "greater than or equal to 5"),
            ("short texts that are long", decontaminate({}, minWords=20), "minWords must not be above ngram"),
            (
                "a data set of the Hub in executor pods",
                decontaminate({"type": "Hub", "path": None, "dataset": "org/name"})
                | {"output": "s3://splits/a", "spark": {"mode": "Kubernetes"}},
                (
                    "decontaminate.sources of type Hub require spark.mode Local, which downloads data sets into the prep "
                    "pod"
                ),
            ),
        )
    },
    "nothing to redact": (job(data=prepared(redact=[])), "should have at least 1 items"),
    "a data set of the Hub in executor pods": (
        job(
            data=prepared(spark={"mode": "Kubernetes"}) | {"source": {"type": "Hub", "dataset": "org/name"}},
        ),
        "source.type Hub requires prepare.spark.mode Local, which downloads the data set into the prep pod",
    ),
    "a setting of Spark that loads code": (
        job(
            data=prepared(
                spark={"conf": {"spark.sql.adaptive.enabled": "true", "spark.jars": "s3://a/b.jar"}}
            )
        ),
        "conf accepts only settings of execution (such as spark.sql.adaptive",
    ),
    "output over the source": (
        job(data=prepared(output="/data/corpus")),
        "prepare.output must not be the path of a source: set another folder",
    ),
    "a SparkApplication on Databricks": (
        job(
            data=prepared(
                output="s3://splits/a",
                spark={"mode": "SparkApplication", "databricks": {"volume": "/Volumes/a/b/c"}},
            )
        ),
        "databricks is required when mode is Databricks, and forbidden otherwise",
    ),
    "executors in one pod": (
        job(data=prepared(spark={"executors": 2})),
        "executors, executorCores and executorMemory can be set only when mode is Kubernetes or SparkApplication",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
    **{
        f"the output of the installation, {what}": job(
            data={"source": {"type": "Delta", "table": "main.llm.chats"}, "prepare": prepare},
            model={"base": "org/base"},
        )
        for what, prepare in {
            "with executors": {"spark": {"mode": "Kubernetes"}},
            "on Databricks": {"spark": {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}},
            "with evaluation sets": {
                "decontaminate": {"sources": [{"name": "a", "type": "CSV", "path": "s3://e/a"}]}
            },
        }.items()
    },
    "a mix of sources": job(data=prepared() | {"source": mixed()}),
    "limits of the prompt, and columns of duplicates": job(
        data=without_columns(minPromptChars=2, maxPromptChars=9, dedupe={"columns": ["prompt"]})
    ),
    "evaluation sets": job(
        data=prepared(**decontaminate({"version": 3, "columns": ["a"]}, ngram=5, minWords=5))
    ),
    "the test split of the source as an evaluation set": job(
        data={
            "source": {"type": "Hub", "dataset": "org/name"},
            "prepare": {
                "output": "/y",
                **decontaminate({"type": "Hub", "path": None, "dataset": "org/name", "split": "test"}),
            },
        }
    ),
    "languages": job(data=prepared(languages=["en", "de"])),
    "redaction": job(data=prepared(redact=["Email", "Phone", "CardNumber", "Secret"])),
    "a version at a time": source(type="Delta", path="/a", versionTime="2026-11-01T00:00:00+01:00"),
    "a split of the Hub": source(type="Hub", dataset="org/name", config="en", split="train", revision="main"),
    "settings of Spark": job(
        data=prepared(
            spark={"conf": {"spark.sql.shuffle.partitions": "9", "spark.hadoop.fs.s3a.threads.max": "9"}}
        )
    ),
    "columns that are found in the data": job(data=without_columns()),
    "preferences that are found in the data": job(
        data=without_columns(promptTemplate="Q: {prompt}"), objective=DPO
    ),
    "split tables in the catalog of the chart": job(
        data=prepared(**saved("a.b", validation="a.c", test="a.d"))
    ),
    "split tables in Hive": job(data=prepared(catalog=HIVE, **saved("a.b", test="a.d"))),
    "executors on S3": job(data=on_executors("s3://corpus/a", "s3://splits/a")),
    "executors on a volume": job(data=on_executors("/data/corpus", "/data/splits")),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
