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
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}


REFUSED: dict[str, tuple[Json, str]] = {
    "a source in a store that cannot be read": (
        source(type="Delta", path="wasbs://c@a.blob.core.windows.net/corpus"),
        "path must be s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute "
        "path",
    ),
    "an output that training cannot read": (
        job(data=prepared(output="hdfs://splits/support")),
        "output must be s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute "
        "path",
    ),
    "a catalog, and no table": (
        job(data=prepared(catalog=UNITY)),
        "prepare.catalog needs a source with a table: set the table, or remove the catalog",
    ),
    **{
        f"the table {table} in {catalog['type']}": (
            job(data=prepared(catalog=catalog) | {"source": {"type": "Delta", "table": table}}),
            "write a table as catalog.schema.table, or as database.table if prepare.catalog has type Hive",
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
        "write a table as catalog.schema.table, or as database.table",
    ),
    "a catalog without its server": (
        job(data=prepared(catalog={"type": "UnityCatalog"}) | {"source": NAMED}),
        "set unityCatalog if, and only if, type is UnityCatalog",
    ),
    "a password in the address of a catalog": (
        job(
            data=prepared(catalog={"type": "UnityCatalog", "unityCatalog": {"uri": "http://me:word@unity"}})
            | {"source": NAMED}
        ),
        "uri must be an http or https address; put a token into the Secret of secretRef",
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
        "set path (and version) for type Delta, or train (and validation and test) for files",
    ),
    **{
        f"splits in a workspace: {field}": (
            job(data={"splits": splits, "columns": {"type": "Text"}}),
            "the training pods cannot read /Volumes and dbfs:/ of a Databricks workspace: put the splits in an object store",
        )
        for field, splits in {
            "path": {"type": "Delta", "path": "/Volumes/a/b/c/splits"},
            "train": {"type": "Parquet", "train": "dbfs:/splits"},
            "test": {"type": "Parquet", "train": "/x", "test": "/dbfs/splits"},
        }.items()
    },
    "source and splits": (
        job(data={**prepared(), "splits": {"type": "Delta", "path": "/x"}}),
        "set either source (with prepare) or splits",
    ),
    "no type of columns": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"prompt": "p"}}),
        "spec.data.columns.type: Required value",
    ),
    "a column of another type": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "columns": {"type": "Text", "prompt": "p"}}),
        "prompt needs type PromptResponse, Preference or Unpaired",
    ),
    "a preparation of splits": (
        job(data={"splits": {"type": "Delta", "path": "/x"}, "prepare": {"output": "/y"}}),
        "prepare needs source: prepared splits are read as they are",
    ),
    "weights of a text's messages": (
        job(data=prepared(columns={"type": "Text", "messageWeight": "train"})),
        "messageWeight needs type Messages",
    ),
    "a template of conversations": (
        job(data=prepared(columns={"type": "Messages", "messages": "m"}, promptTemplate="{m}")),
        "prepare.promptTemplate cannot be used with columns of type Messages",
    ),
    **{
        f"a source: {what}": (source(**fields), sentence)
        for what, fields, sentence in (
            (
                "a table of files",
                {"type": "CSV", "table": "a.b"},
                "table needs type Delta or Parquet; use path for other files",
            ),
            (
                "a version of files",
                {"type": "CSV", "path": "/a", "version": 1},
                "version and versionTime need type Delta",
            ),
            (
                "a time of files",
                {"type": "Parquet", "path": "/a", "versionTime": "2026-11-01T00:00:00Z"},
                "version and versionTime need type Delta",
            ),
            (
                "two versions",
                {"type": "Delta", "path": "/a", "version": 1, "versionTime": "2026-11-01T00:00:00Z"},
                "set version or versionTime, not both",
            ),
            (
                "a time that is none",
                {"type": "Delta", "path": "/a", "versionTime": "yesterday"},
                "spec.data.source.versionTime: Invalid value",
            ),
            ("a path of the Hub", {"type": "Hub", "path": "/a"}, "set dataset for type Hub"),
            (
                "a split of files",
                {"type": "JSONLines", "path": "/a", "split": "train"},
                "config, split and revision need type Hub",
            ),
        )
    },
    **{
        f"a mix: {what}": (job(data=prepared(**fields) | {"source": mix}), sentence)
        for what, mix, fields, sentence in (
            ("no sources", {"type": "Mix"}, {}, "sources for type Mix"),
            ("a path", mixed() | {"path": "/a"}, {}, "sources for type Mix"),
            ("sources of files", mixed() | {"type": "CSV", "path": "/a"}, {}, "sources for type Mix"),
            ("a source that is nowhere", mixed(path=None), {}, "set dataset for type Hub"),
            ("a weight of nothing", mixed(weight=0), {}, "weight: Invalid value: 0"),
            (
                "output over a source",
                mixed(),
                {"output": "/mixed/csv"},
                "prepare.output is the source itself",
            ),
            (
                "an evaluation set of its own",
                mixed(),
                decontaminate({"path": "/mixed/csv"}),
                "prepare.decontaminate.sources includes the source, which would drop every example",
            ),
            (
                "a data set of the Hub in executor pods",
                mixed(type="Hub", path=None, dataset="org/name"),
                {"spark": {"mode": "Kubernetes"}},
                "source.type Hub needs prepare.spark.mode Local",
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
        "would drop every example",
    ),
    "columns of duplicates that stay": (
        job(data=prepared(dedupe={"exact": False, "columns": ["a"]})),
        "dedupe.columns needs dedupe.exact",
    ),
    "the prompt of a text": (
        job(data=prepared(minPromptChars=1)),
        "minPromptChars and maxPromptChars need columns of type PromptResponse, Preference or Unpaired",
    ),
    "turns of a text": (
        job(data=prepared(conversation={})),
        "prepare.conversation needs columns of type PromptResponse",
    ),
    "texts that no chat template renders": (
        job(data=prepared(onTemplateError="Drop")),
        "prepare.onTemplateError needs a template that can fail on a row",
    ),
    "Jinja without a template": (
        job(data=prepared(templateSyntax="Jinja")),
        "templateSyntax Jinja needs promptTemplate",
    ),
    "tools of a text": (
        job(data=prepared(columns={"type": "Text", "tools": "t"})),
        "tools needs type Messages",
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
            ("nowhere", decontaminate({"path": None}), "set dataset for type Hub"),
            ("twice", decontaminate({}, {}), "Duplicate value"),
            ("the source", decontaminate({"path": "/data/corpus"}), "would drop every example"),
            (
                "the output",
                decontaminate({"path": "/data/out"}) | {"output": "/data/out"},
                "includes the output",
            ),
            ("a run of words that is none", decontaminate({}, ngram=4), "greater than or equal to 5"),
            ("short texts that are long", decontaminate({}, minWords=20), "minWords must not be above ngram"),
            (
                "a data set of the Hub in executor pods",
                decontaminate({"type": "Hub", "path": None, "dataset": "org/name"})
                | {"output": "s3://splits/a", "spark": {"mode": "Kubernetes"}},
                "decontaminate.sources of type Hub need spark.mode Local",
            ),
        )
    },
    "nothing to redact": (job(data=prepared(redact=[])), "should have at least 1 items"),
    "a data set of the Hub in executor pods": (
        job(
            data=prepared(spark={"mode": "Kubernetes"}) | {"source": {"type": "Hub", "dataset": "org/name"}},
        ),
        "source.type Hub needs prepare.spark.mode Local",
    ),
    "a setting of Spark that loads code": (
        job(
            data=prepared(
                spark={"conf": {"spark.sql.adaptive.enabled": "true", "spark.jars": "s3://a/b.jar"}}
            )
        ),
        "conf takes settings of execution",
    ),
    "output over the source": (
        job(data=prepared(output="/data/corpus")),
        "prepare.output is the source itself",
    ),
    "a SparkApplication on Databricks": (
        job(
            data=prepared(
                output="s3://splits/a",
                spark={"mode": "SparkApplication", "databricks": {"volume": "/Volumes/a/b/c"}},
            )
        ),
        "if, and only if, mode is Databricks",
    ),
    "executors in one pod": (
        job(data=prepared(spark={"executors": 2})),
        "executors, executorCores and executorMemory need mode Kubernetes or SparkApplication",
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
    "executors on S3": job(data=on_executors("s3://corpus/a", "s3://splits/a")),
    "executors on a volume": job(data=on_executors("/data/corpus", "/data/splits")),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
