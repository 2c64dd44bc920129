"""What the API server refuses and accepts of jobs with a Databricks workspace: runs, models, volumes, preparations."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import (
    AT_DATABRICKS,
    IN_DBFS,
    MODEL,
    NO_LOGIN,
    UNITY,
    databricks_run,
    prepared,
    registered,
)
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]
IN_WORKSPACE = "output must not be in a Databricks workspace: the training pods cannot read it"


REFUSED: dict[str, tuple[Json, str]] = {
    "a run in a workspace, a model elsewhere": (
        registered(tracking=AT_DATABRICKS | {"registryUri": "http://m"}),
        "tracking.uri databricks and tracking.registryUri databricks-uc require each other",
    ),
    "a model in Unity Catalog, a run elsewhere": (
        registered(tracking=AT_DATABRICKS | {"uri": "http://m"}),
        "tracking.uri databricks and tracking.registryUri databricks-uc require each other",
    ),
    "one name in Unity Catalog": (
        registered(register={"model": "support"}),
        "a model in Unity Catalog requires register.model catalog.schema.name, register.signature true, and no register.upload",
    ),
    "the name of the job in Unity Catalog": (
        registered(register={}),
        "a model in Unity Catalog requires register.model catalog.schema.name, register.signature true, and no register.upload",
    ),
    "a way of upload to Unity Catalog": (
        registered(register=MODEL | {"upload": "Proxy"}),
        "a model in Unity Catalog requires register.model catalog.schema.name, register.signature true, and no register.upload",
    ),
    "no signature in Unity Catalog": (
        registered(register=MODEL | {"signature": False}),
        "a model in Unity Catalog requires register.model catalog.schema.name, register.signature true, and no register.upload",
    ),
    **{
        f"the tag {key!r}": (
            registered(register=MODEL | {"tags": {"a b": "c", key: "c"}}),
            (
                "Unity Catalog does not allow . , - = / : in the key of a tag, or a space at its start or end: rename the "
                "tag"
            ),
        )
        for key in ("a.b", "a,b", "a-b", "a=b", "a/b", "a:b", " a", "a ")
    },
    "an experiment that is no path": (
        registered(tracking=AT_DATABRICKS | {"experiment": "support"}),
        "tracking.experiment must be a path at Databricks, such as /Shared/support",
    ),
    "splits in a workspace": (job(data=prepared(output="/Volumes/main/llm/splits")), IN_WORKSPACE),
    "checkpoints in DBFS": (job(checkpoint={"uri": "/dbfs/checkpoints"}), IN_DBFS),
    "checkpoints in a workspace without its login": (job(checkpoint={"uri": "/Volumes/a/b/c"}), NO_LOGIN),
    "no volume for Databricks": (
        job(data=prepared(spark={"mode": "Databricks"})),
        "databricks is required when mode is Databricks, and forbidden otherwise",
    ),
    "a volume that is none": (
        databricks_run({"volume": "/tmp/work"}),
        "volume must be /Volumes/catalog/schema/volume, or a folder in it",
    ),
    "Databricks beside another mode": (
        databricks_run(spark={"mode": "Local"}),
        "databricks is required when mode is Databricks, and forbidden otherwise",
    ),
    "a cluster without its type": (
        databricks_run({"compute": {"type": "Serverless", "existingCluster": {"clusterId": "a"}}}),
        "type ExistingCluster requires existingCluster, type NewCluster requires newCluster, and type Serverless allows serverless",
    ),
    "a type without its cluster": (
        databricks_run({"compute": {"type": "NewCluster"}}),
        "type ExistingCluster requires existingCluster, type NewCluster requires newCluster, and type Serverless allows serverless",
    ),
    "serverless settings of a cluster": (
        databricks_run(
            {"compute": {"type": "ExistingCluster", "existingCluster": {"clusterId": "a"}, "serverless": {}}}
        ),
        "type ExistingCluster requires existingCluster, type NewCluster requires newCluster, and type Serverless allows serverless",
    ),
    "machines of a pool": (
        databricks_run(
            {"compute": {"type": "NewCluster", "newCluster": {"sparkVersion": "17.3.x-scala2.13"}}}
        ),
        "set exactly one of nodeType and instancePoolId",
    ),
    "memory of a driver on Databricks": (
        databricks_run(spark={"driverMemory": "4Gi"}),
        "driverMemory must not be set when mode is Databricks, which has no prep pod",
    ),
    "executors on Databricks": (
        databricks_run(spark={"executors": 2}),
        "executors, executorCores and executorMemory can be set only when mode is Kubernetes or SparkApplication",
    ),
    "settings of serverless Spark": (
        databricks_run(spark={"conf": {"spark.sql.shuffle.partitions": "2"}}),
        "conf requires databricks.compute.type NewCluster when mode is Databricks",
    ),
    "a filter on serverless compute": (
        databricks_run(filter="a = 1"),
        "filter requires a cluster when spark.mode is Databricks: serverless compute cannot check it",
    ),
    **{
        f"{field} of a pod on Databricks": (
            databricks_run(pods={"prepare": {field: value}}),
            "pods.prepare can be set only when data.source is set and data.prepare.spark.mode is not Databricks",
        )
        for field, value in (
            ("image", "mine:1"),
            ("env", [{"name": "A", "value": "b"}]),
            ("envFrom", [{"secretRef": {"name": "a"}}]),
            ("serviceAccountName", "mine"),
            ("template", {"spec": {}}),
        )
    },
    "a folder of a pod for a Databricks run": (
        databricks_run(output="/data/splits"),
        ("output must not be a local path when spark.mode is Databricks: use s3://bucket/folder"),
    ),
    "a source of a pod for a Databricks run": (
        databricks_run(source={"type": "Parquet", "path": "/data/corpus"}),
        (
            "source.path must not be a local path when prepare.spark.mode is Databricks: set table, or use "
            "s3://bucket/folder or /Volumes/catalog/schema/volume"
        ),
    ),
    "a source of a mix of a pod for a Databricks run": (
        databricks_run(
            source={"type": "Mix", "sources": [{"name": "a", "type": "CSV", "path": "/data/corpus"}]}
        ),
        (
            "source.path must not be a local path when prepare.spark.mode is Databricks: set table, or use "
            "s3://bucket/folder or /Volumes/catalog/schema/volume"
        ),
    ),
    "a catalog for a Databricks run": (
        databricks_run(catalog=UNITY),
        "catalog must not be set when spark.mode is Databricks",
    ),
    "a Hub data set for a Databricks run": (
        databricks_run(source={"type": "Hub", "dataset": "a/b"}),
        "source.type Hub requires prepare.spark.mode Local, which downloads the data set into the prep pod",
    ),
    "a model on a volume, and a Databricks run": (
        databricks_run(base="/models/base"),
        (
            "model.base must not be a local path when data.prepare.spark.mode is Databricks: use a Hub id, a volume of "
            "Unity Catalog, or models:/ with tracking.uri databricks"
        ),
    ),
    "a model in a store, and a Databricks run": (
        databricks_run(base="s3://models/base"),
        (
            "model.base must not be in an object store when data.prepare.spark.mode is Databricks: use a Hub id, or models:/ with tracking.uri databricks"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
    "folders in volumes of Unity Catalog": registered(
        model={"base": "/Volumes/main/llm/work/base"},
        checkpoint={
            "uri": "/Volumes/main/llm/work/checkpoints",
            "resumeFrom": {"type": "Uri", "uri": "/Volumes/main/llm/work/others"},
        },
        output={"uri": "/Volumes/main/llm/work/tiny"},
        tracking={"uri": "databricks"},
    ),
    "a base in a volume, and a Databricks run": databricks_run(base="/Volumes/main/llm/work/base"),
    "splits in tables": registered(
        data={
            "columns": {"type": "Text"},
            "splits": {
                "type": "Tables",
                "train": "main.support.chat_train",
                "validation": "main.support.chat_validation@v3",
            },
        },
        tracking={"uri": "databricks"},
    ),
    "split tables of a Databricks run": databricks_run(
        splitTables={"train": "main.support.chat_train", "validation": "main.support.chat_validation"}
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
