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
IN_WORKSPACE = (
    "the training pods cannot read a folder of a Databricks workspace: use the object storage behind it"
)


REFUSED: dict[str, tuple[Json, str]] = {
    "a run in a workspace, a model elsewhere": (
        registered(tracking=AT_DATABRICKS | {"registryUri": "http://m"}),
        "models of runs in a Databricks workspace are in Unity Catalog: set registryUri to databricks-uc",
    ),
    "a model in Unity Catalog, a run elsewhere": (
        registered(tracking=AT_DATABRICKS | {"uri": "http://m"}),
        "runs of models in Unity Catalog are in its workspace: set uri to databricks",
    ),
    "one name in Unity Catalog": (
        registered(register={"model": "support"}),
        "a model in Unity Catalog has three names: write register.model as catalog.schema.name",
    ),
    "the name of the job in Unity Catalog": (
        registered(register={}),
        "a model in Unity Catalog has three names: write register.model as catalog.schema.name",
    ),
    "a way of upload to Unity Catalog": (
        registered(register=MODEL | {"upload": "Proxy"}),
        "models of a Databricks workspace go straight to its store: remove register.upload",
    ),
    "no signature in Unity Catalog": (
        registered(register=MODEL | {"signature": False}),
        "Unity Catalog needs the signature of a model: remove register.signature",
    ),
    **{
        f"the tag {key!r}": (
            registered(register=MODEL | {"tags": {"a b": "c", key: "c"}}),
            "Unity Catalog does not allow . , - = / : in the key of a tag, nor spaces at its ends: rename it",
        )
        for key in ("a.b", "a,b", "a-b", "a=b", "a/b", "a:b", " a", "a ")
    },
    "an experiment that is no path": (
        registered(tracking=AT_DATABRICKS | {"experiment": "support"}),
        "an experiment of a Databricks workspace is a path, such as /Shared/support",
    ),
    "splits in a workspace": (job(data=prepared(output="/Volumes/main/llm/splits")), IN_WORKSPACE),
    "checkpoints in DBFS": (job(checkpoint={"uri": "/dbfs/checkpoints"}), IN_DBFS),
    "checkpoints in a workspace without its login": (job(checkpoint={"uri": "/Volumes/a/b/c"}), NO_LOGIN),
    "no volume for Databricks": (
        job(data=prepared(spark={"mode": "Databricks"})),
        "set databricks, which names the volume for the operator's wheel, if, and only if, mode is Databricks",
    ),
    "a volume that is none": (
        databricks_run({"volume": "/tmp/work"}),
        "write the volume as /Volumes/catalog/schema/volume, with or without a folder after it",
    ),
    "Databricks beside another mode": (
        databricks_run(spark={"mode": "Local"}),
        "set databricks, which names the volume for the operator's wheel, if, and only if, mode is Databricks",
    ),
    "a cluster without its type": (
        databricks_run({"compute": {"type": "Serverless", "existingCluster": {"clusterId": "a"}}}),
        "set existingCluster if, and only if, type is ExistingCluster",
    ),
    "a type without its cluster": (
        databricks_run({"compute": {"type": "NewCluster"}}),
        "set newCluster if, and only if, type is NewCluster",
    ),
    "serverless settings of a cluster": (
        databricks_run(
            {"compute": {"type": "ExistingCluster", "existingCluster": {"clusterId": "a"}, "serverless": {}}}
        ),
        "serverless needs type Serverless",
    ),
    "machines of a pool": (
        databricks_run(
            {"compute": {"type": "NewCluster", "newCluster": {"sparkVersion": "17.3.x-scala2.13"}}}
        ),
        "set nodeType or instancePoolId, not both",
    ),
    "memory of a driver on Databricks": (
        databricks_run(spark={"driverMemory": "4Gi"}),
        "driverMemory needs a prep pod: with mode Databricks, remove it",
    ),
    "executors on Databricks": (
        databricks_run(spark={"executors": 2}),
        "executors, executorCores and executorMemory need mode Kubernetes or SparkApplication",
    ),
    "settings of serverless Spark": (
        databricks_run(spark={"conf": {"spark.sql.shuffle.partitions": "2"}}),
        "conf needs databricks.compute of type NewCluster: other compute is configured already",
    ),
    "a filter on serverless compute": (
        databricks_run(filter="a = 1"),
        "filter with spark.mode Databricks needs a cluster: serverless compute cannot check it",
    ),
    **{
        f"{field} of a pod on Databricks": (
            databricks_run(pods={"prepare": {field: value}}),
            "data.prepare.spark.mode Databricks creates no prep pod: remove pods.prepare",
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
        "output is a folder of one pod: with spark.mode Databricks use s3://bucket/folder, which the run writes through an "
        "external location and the training pods read",
    ),
    "a source of a pod for a Databricks run": (
        databricks_run(source={"type": "Parquet", "path": "/data/corpus"}),
        "source.path is a folder of a pod: with prepare.spark.mode Databricks use table, s3://bucket/folder or "
        "/Volumes/catalog/schema/volume",
    ),
    "a source of a mix of a pod for a Databricks run": (
        databricks_run(
            source={"type": "Mix", "sources": [{"name": "a", "type": "CSV", "path": "/data/corpus"}]}
        ),
        "source.path is a folder of a pod: with prepare.spark.mode Databricks use table, s3://bucket/folder or "
        "/Volumes/catalog/schema/volume",
    ),
    "a catalog for a Databricks run": (
        databricks_run(catalog=UNITY),
        "spark.mode Databricks finds tables in its workspace: remove catalog",
    ),
    "a Hub data set for a Databricks run": (
        databricks_run(source={"type": "Hub", "dataset": "a/b"}),
        "source.type Hub needs prepare.spark.mode Local: the data set is downloaded into the prep pod",
    ),
    "a model on a volume, and a Databricks run": (
        databricks_run(base="/models/base"),
        "data.prepare.spark.mode Databricks reads the tokenizer of model.base, and this is a folder of the pods: use a Hub "
        "id, a volume of Unity Catalog, or models:/ with tracking.uri databricks",
    ),
    "a model in a store, and a Databricks run": (
        databricks_run(base="s3://models/base"),
        "data.prepare.spark.mode Databricks reads the tokenizer of model.base, and the run has no credentials for this "
        "store: use a Hub id, or models:/ with tracking.uri databricks",
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
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
