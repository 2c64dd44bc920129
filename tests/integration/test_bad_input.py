"""Bad input is refused in a sentence, at the earliest place that can know."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.ports import free_port
from support.process import running
from support.refusals import refused
from support.waiting import wait_for
from worlds.processes.jobs import PREPARED, TRAINED, error, job, splits_given
from worlds.processes.servers import Plane
from worlds.processes.world import World

Json = dict[str, Any]


def prepared(columns: Json | None = None, **fields: Any) -> Json:
    """spec.data with fields of prepare replaced."""
    return {
        "source": {"type": "Parquet", "path": "/data/corpus"},
        "columns": columns or {"type": "Text"},
        "prepare": {"output": "/data/splits", **fields},
    }


def source(**fields: Any) -> Json:
    """A job whose data.source has these fields."""
    return job(data=prepared() | {"source": fields})


def evaluated(evaluation: Json, **spec: Any) -> Json:
    """A job that registers a version and evaluates it."""
    return job(evaluation=evaluation, **({"register": {}} | spec))


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


def found(**fields: Any) -> Json:
    """The same without columns."""
    return {name: part for name, part in prepared(**fields).items() if name != "columns"}


def on_executors(path: str, output: str, **fields: Any) -> Json:
    """spec.data of a preparation whose executors are pods of their own."""
    prepare = {"output": output, "spark": {"mode": "Kubernetes"}, **fields}
    return {"source": {"type": "Parquet", "path": path}, "prepare": prepare}


NAMED: Json = {"type": "Delta", "table": "support.chats"}
UNITY: Json = {"type": "UnityCatalog", "unityCatalog": {"uri": "http://unity:8080"}}
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}
PREFERENCES: Json = {"type": "Preference", "prompt": "p", "chosen": "c", "rejected": "r"}
NO_PACKS: Json = {"packing": False}
DPO: Json = {"type": "DPO"}
UNPAIRED: Json = {"type": "Unpaired", "label": "thumb"}
KTO: Json = {"type": "KTO"}
OF_ANSWERS_AND_METHODS = "objectives DPO, KTO, ORPO, SimPO work with method Full, LoRA, QLoRA or DoRA"
COLUMNS_OF: Json = {"DPO": PREFERENCES, "KTO": UNPAIRED, "ORPO": PREFERENCES}
OBJECT = "the name of an object must have lowercase letters"
VARIABLE = "the name of an environment variable must have letters"


def code(**source: Any) -> Json:
    """spec.trainer with the user's own code."""
    return {"command": ["python"], "code": source}


DISTILLATION: Json = {"type": "Distillation", "distillation": {"teacher": "/models/teacher"}}


AT_DATABRICKS: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
MODEL: Json = {"model": "main.llm.support"}
IN_WORKSPACE = (
    "the training pods cannot read a folder of a Databricks workspace: use the object storage behind it"
)
IN_DBFS = "the training pods cannot reach DBFS: use a volume of Unity Catalog, or object storage"
NO_LOGIN = (
    "the training pods reach /Volumes of a Databricks workspace with the login of tracking: set tracking.uri to databricks, or "
    "use the object storage behind it"
)


def registered(**parts: Any) -> Json:
    """A job that registers in Unity Catalog."""
    return job(**({"tracking": AT_DATABRICKS, "register": MODEL} | parts))


def databricks_run(
    databricks: Json | None = None,
    *,
    spark: Json | None = None,
    source: Json | None = None,
    base: str = "org/model",
    **prepare: Any,
) -> Json:
    """A job whose preparation is a Databricks run; parts of it replaced."""
    own = {"volume": "/Volumes/main/llm/work", **(databricks or {})}
    data = {
        "source": source or {"type": "Delta", "table": "main.llm.chats"},
        "prepare": {
            "output": "s3://lake/splits",
            "spark": {"mode": "Databricks", "databricks": own, **(spark or {})},
            **prepare,
        },
    }
    return job(data=data, model={"base": base})


REFUSED_BY_THE_SCHEMA: dict[str, tuple[Json, str]] = {
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
        f"a tag with {mark}": (
            registered(register=MODEL | {"tags": {"a_b": "c", f"a{mark}b": "c"}}),
            "Unity Catalog allows none of . , - = / : in the key of a tag: rename it",
        )
        for mark in ".,-=/:"
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
        "mode Databricks needs databricks, with the volume for the operator's wheel",
    ),
    "a volume that is none": (
        databricks_run({"volume": "/tmp/work"}),
        "a volume of Unity Catalog is /Volumes/catalog/schema/volume, and a folder in it if you like",
    ),
    "Databricks beside another mode": (
        databricks_run(spark={"mode": "Local"}),
        "databricks needs mode Databricks",
    ),
    "a cluster without its type": (
        databricks_run({"compute": {"type": "Serverless", "existingCluster": {"clusterId": "a"}}}),
        "existingCluster and type ExistingCluster go together",
    ),
    "a type without its cluster": (
        databricks_run({"compute": {"type": "NewCluster"}}),
        "newCluster and type NewCluster go together",
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
        "set nodeType, or instancePoolId, whose nodes have a type",
    ),
    "memory of a driver on Databricks": (
        databricks_run(spark={"driverMemory": "4Gi"}),
        "driverMemory is that of a prep pod: with mode Databricks the cluster gives the driver its memory",
    ),
    "executors on Databricks": (
        databricks_run(spark={"executors": 2}),
        "executors, executorCores and executorMemory need mode Kubernetes or SparkApplication",
    ),
    "settings of serverless Spark": (
        databricks_run(spark={"conf": {"spark.sql.shuffle.partitions": "2"}}),
        "conf needs databricks.compute of type NewCluster: other compute has its settings already",
    ),
    "a filter on serverless compute": (
        databricks_run(filter="a = 1"),
        "filter needs a cluster with spark.mode Databricks: serverless compute has no parser to check it with",
    ),
    "an image on Databricks": (
        databricks_run(image="mine:1"),
        "there is no prep pod with spark.mode Databricks: remove image; the operator brings the code",
    ),
    "resources of a pod on Databricks": (
        databricks_run(podTemplate={"spec": {}}),
        "there is no prep pod with spark.mode Databricks: remove podTemplate; spark.databricks.compute says what the run gets",
    ),
    "variables of a pod on Databricks": (
        databricks_run(env=[{"name": "A", "value": "b"}]),
        "there is no prep pod with spark.mode Databricks: remove env; a cluster has spark.databricks.compute.newCluster.env",
    ),
    "Secrets of a pod on Databricks": (
        databricks_run(envFrom=[{"secretRef": {"name": "a"}}]),
        "there is no prep pod with spark.mode Databricks: remove envFrom; a cluster has "
        "spark.databricks.compute.newCluster.env",
    ),
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
    "a source in a store that cannot be read": (
        source(type="Delta", path="wasbs://c@a.blob.core.windows.net/corpus"),
        "path is s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute "
        "path",
    ),
    "an output that training cannot read": (
        job(data=prepared(output="hdfs://splits/support")),
        "output is s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute "
        "path",
    ),
    "an output of a script": (
        job(output={"uri": "gs://models/support"}, trainer={"command": ["torchrun", "a.py"]}),
        "output needs the built-in loop",
    ),
    "an output in a store that cannot be written": (
        job(output={"uri": "hdfs://models/support"}),
        "uri is s3://bucket/folder, gs://bucket/folder",
    ),
    "an output without a folder": (job(output={"uri": "gs://models"}), "uri is s3://bucket/folder"),
    "an output in a workspace without its login": (job(output={"uri": "/Volumes/main/llm/models"}), NO_LOGIN),
    "an output in a workspace, and runs elsewhere": (
        job(output={"uri": "/Volumes/main/llm/models"}, tracking={"uri": "http://mlflow:5000"}),
        NO_LOGIN,
    ),
    "an output in DBFS": (job(output={"uri": "/dbfs/models"}, tracking=AT_DATABRICKS), IN_DBFS),
    **{
        f"an output {output} beside checkpoints {checkpoints}": (
            job(output={"uri": output}, checkpoint={"uri": checkpoints}),
            "one of output.uri and checkpoint.uri is in the other",
        )
        for output, checkpoints in (
            ("s3://a/b", "s3://a/b"),
            ("s3://a/b/", "s3://a/b"),
            ("s3://a/b/c", "s3://a/b"),
            ("/a", "/a/b/"),
        )
    },
    "a way of upload of a script": (
        job(register={"upload": "Direct"}, trainer={"command": ["torchrun", "a.py"]}),
        "register.upload needs the built-in loop",
    ),
    "checkpoints in a store that cannot be written": (
        job(checkpoint={"uri": "hdfs://a/b"}),
        "uri is s3://bucket/folder, gs://bucket/folder",
    ),
    "a catalog, and no table": (
        job(data=prepared(catalog=UNITY)),
        "prepare.catalog is where tables are found by name, and no source has table: set it, or remove the catalog",
    ),
    "a catalog for a Databricks run": (
        databricks_run(catalog=UNITY),
        "with spark.mode Databricks tables are found in the workspace: remove catalog",
    ),
    **{
        f"the table {table} in {found['type']}": (
            job(data=prepared(catalog=found) | {"source": {"type": "Delta", "table": table}}),
            "a table is catalog.schema.table with prepare.catalog of type UnityCatalog and Databricks, and database.table with "
            "type Hive",
        )
        for table, found in (("chats", UNITY), ("support.chats", UNITY), ("a.b.c.d", UNITY), ("a.b.c", HIVE))
    },
    "a table of an evaluation set in a Hive metastore": (
        job(
            data=prepared(
                catalog=HIVE, **decontaminate({"path": None, "table": "a.b.c"}, {"name": "b", "path": "/b"})
            )
        ),
        "a table is catalog.schema.table with prepare.catalog of type UnityCatalog and Databricks",
    ),
    "a catalog without its server": (
        job(data=prepared(catalog={"type": "UnityCatalog"}) | {"source": NAMED}),
        "unityCatalog and type UnityCatalog go together",
    ),
    "a password in the address of a catalog": (
        job(
            data=prepared(catalog={"type": "UnityCatalog", "unityCatalog": {"uri": "http://me:word@unity"}})
            | {"source": NAMED}
        ),
        "uri is the http or https address of the server; a token is in the Secret of secretRef",
    ),
    "a Hive metastore of another protocol": (
        job(data=prepared(catalog={"type": "Hive", "hive": {"uri": "http://metastore"}}) | {"source": NAMED}),
        "uri is thrift://host:port; several, of replicas of one metastore, are separated by commas",
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
    "unknown method": (job(method={"type": "Magic"}), 'spec.method.type: Unsupported value: "Magic"'),
    "nodes 0": (job(distributed={"nodes": 0}), "spec.distributed.nodes: Invalid value: 0"),
    "split does not add up": (
        job(data=prepared(splitRatios={"train": 0.8, "validation": 0.1, "test": 0.2})),
        "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
    ),
    "an evaluation without a version": (
        job(evaluation={}, register=None),
        "evaluation needs register: it evaluates the registered version",
    ),
    "an evaluation of unpaired answers": (
        evaluated({}, data=prepared(columns={"type": "Unpaired"}), objective=KTO),
        "those of data.columns type Unpaired may be bad ones: remove evaluation, or set evaluation.command",
    ),
    "answers of texts": (
        evaluated({"metrics": ["Loss", "Rouge"]}, data=prepared()),
        "rows of data.columns type Text have no answers: choose evaluation.metrics Loss and Perplexity",
    ),
    "an evaluation without a test split": (
        evaluated({}, data=prepared(splitRatios={"train": 0.9, "validation": 0.1, "test": 0})),
        "set data.prepare.splitRatios.test above 0, or evaluation.split: Validation",
    ),
    "an evaluation without a validation split": (
        evaluated(
            {"split": "Validation"}, data=prepared(splitRatios={"train": 0.9, "validation": 0, "test": 0.1})
        ),
        "set data.prepare.splitRatios.validation above 0, or evaluation.split: Test",
    ),
    "an evaluation without files of the test split": (
        evaluated({}, data={"splits": {"type": "Parquet", "train": "/x", "validation": "/y"}}),
        "evaluation.split Test needs rows: set data.splits.test, or evaluation.split: Validation",
    ),
    "an evaluation without files of the validation split": (
        evaluated({"split": "Validation"}, data={"splits": {"type": "Parquet", "train": "/x", "test": "/y"}}),
        "evaluation.split Validation needs rows: set data.splits.validation, or evaluation.split: Test",
    ),
    "files of the test split beside a table": (
        job(data={"splits": {"type": "Delta", "path": "/x", "test": "/y"}}),
        "set path (and version) for type Delta, or train (and validation and test) for files",
    ),
    "a command for virtual tokens": (
        evaluated({"command": ["judge"]}, method={"type": "PromptTuning"}, training=NO_PACKS),
        "evaluation.command reads a standalone model, and virtual tokens cannot be merged into one",
    ),
    **{
        f"{field} of the built-in evaluation beside a command": (
            evaluated({"command": ["judge"], field: value}),
            "metrics, baseModel, limit, generations, maxNewTokens and batchSize are for the built-in evaluation: remove them beside "
            "command",
        )
        for field, value in (
            ("metrics", ["Loss"]),
            ("baseModel", True),
            ("limit", 9),
            ("generations", 0),
            ("maxNewTokens", 9),
            ("batchSize", 9),
        )
    },
    "epochs and maxSteps": (
        job(training={"epochs": 1, "maxSteps": 10}),
        "set epochs or maxSteps, not both",
    ),
    "reserved environment": (
        job(trainer={"env": [{"name": "MASTER_ADDR", "value": "me"}]}),
        "the operator sets MASTER_ADDR (rendezvous, MLflow run, recipe): remove it",
    ),
    "reserved environment in nccl": (
        job(distributed={"nccl": {"WORLD_SIZE": "2"}}),
        "the operator sets these variables itself",
    ),
    "name too long": (job("a" * 41), "metadata.name becomes part of host names: at most 40 characters"),
    "name with a dot": (job("a.b"), "metadata.name becomes part of host names"),
    "name that starts with a digit": (job("7b-sft"), "a letter first, no dots"),
    "args without command": (job(trainer={"args": ["--fast"]}), "trainer.args needs trainer.command"),
    "revision of a path": (
        job(model={"base": "/models/base", "revision": "main"}),
        "revision applies to Hub models only",
    ),
    "no answer to take the loss on": (
        job(data=prepared(promptTemplate="{text}"), objective={"lossOn": "Answer"}),
        "objective.lossOn Answer and LastAnswer need data.prepare.responseTemplate",
    ),
    "source and splits": (
        job(data={**prepared(), "splits": {"type": "Delta", "path": "/x"}}),
        "set either source (with prepare) or splits",
    ),
    "lora without LoRA": (job(method={"lora": {"rank": 8}}), "lora needs type LoRA, QLoRA or DoRA"),
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
    "more processes than GPUs": (
        job(distributed={"gpusPerNode": 4, "processesPerNode": 8}),
        "processesPerNode is above gpusPerNode, and each process needs a GPU of its own: lower it, or remove it",
    ),
    "GPUs for the CPU": (
        job(distributed={"gpusPerNode": 4, "device": "CPU"}),
        "device: CPU uses no GPU: remove gpusPerNode",
    ),
    "a product without GPUs": (
        job(distributed={"gpu": {"product": "A100"}}),
        "gpu describes the GPUs of gpusPerNode: set that too",
    ),
    "a product of another maker": (
        job(distributed={"gpusPerNode": 1, "gpu": {"resourceName": "amd.com/gpu", "product": "MI300X"}}),
        "product is a label that NVIDIA's GPU feature discovery sets",
    ),
    "reserved alias": (
        job(register={"model": "m", "aliases": ["v3"]}),
        "MLflow reserves the aliases latest and v<number>: choose another",
    ),
    "code without command": (
        job(trainer={"code": {"configMapRef": {"name": "c"}}}),
        "trainer.code needs trainer.command",
    ),
    "code from two places": (
        job(trainer=code(volume="code", git={"url": "https://host/owner/code"})),
        "set one of configMapRef, volume and git",
    ),
    **{
        f"a repository at {url}": (job(trainer=code(git={"url": url})), sentence)
        for url, sentence in {
            "ssh://git@host/owner/code": "the repository is fetched over HTTPS: write https://host/owner/repository",
            "git@host:owner/code.git": "the repository is fetched over HTTPS: write https://host/owner/repository",
            "https://me:token@host/owner/code": "the address holds a user or a password: put them into a Secret",
            "https://host/owner/code?x=$(TOKEN)": "write the address as https://host/owner/repository, without ? and #",
        }.items()
    },
    "a range of commits": (
        job(trainer=code(git={"url": "https://host/owner/code", "revision": "a..b"})),
        "write a branch, a tag, or a commit with all its digits",
    ),
    **{
        f"the dependency {text}": (job(trainer={"command": ["python"], "dependencies": [text]}), sentence)
        for text, sentence in {
            "--index-url=https://host": "options of pip do not go here: set its variables, such as PIP_INDEX_URL",
            "a @ https://me:token@host/a.whl": "the address holds a user or a password: publish the package in an index",
            "https://host/a.whl": "write a requirement as pip takes it: a name with versions, such as datasets>=3",
            "a>=1,$(TOKEN)": "write a requirement as pip takes it",
            "a b": "write a requirement as pip takes it",
        }.items()
    },
    "dependencies of the built-in loop": (
        job(trainer={"dependencies": ["datasets>=3"]}),
        "trainer.dependencies needs trainer.command: the built-in loop has what it needs",
    ),
    "a dependency twice": (
        job(trainer={"command": ["python"], "dependencies": ["trl", "trl"]}),
        'Duplicate value: "trl"',
    ),
    "packing with virtual tokens": (
        job(method={"type": "PromptTuning"}),
        "virtual tokens are lost under packing and activation checkpointing: set training.packing: false",
    ),
    "activation checkpointing with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"activationCheckpointing": "Auto"}),
        "virtual tokens are lost under packing and activation checkpointing",
    ),
    "compiled layers with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"compile": True}),
        "virtual tokens do not work with compiled layers: set training.compile: false",
    ),
    "a prefix that starts from a text": (
        job(method={"type": "PrefixTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS),
        "softPrompt.initText needs type PromptTuning",
    ),
    "a soft prompt for LoRA": (
        job(method={"type": "LoRA", "softPrompt": {"virtualTokens": 8}}),
        "softPrompt needs type PrefixTuning or PromptTuning",
    ),
    "quantization without QLoRA": (
        job(method={"type": "LoRA", "quantization": {"type": "NF4"}}),
        "quantization needs type QLoRA",
    ),
    "merging a soft prompt": (
        job(method={"type": "PromptTuning", "export": "Merged"}, training=NO_PACKS),
        "export: Merged needs type LoRA, QLoRA or DoRA",
    ),
    **{
        f"{objective['type']} with {method}": (
            job(
                method={"type": method},
                objective=objective,
                training=NO_PACKS,
                data=prepared(columns=COLUMNS_OF[objective["type"]])
                if objective["type"] in COLUMNS_OF
                else prepared(),
            ),
            sentence,
        )
        for objective, methods, sentence in (
            (DPO, ("PrefixTuning", "PromptTuning"), OF_ANSWERS_AND_METHODS),
            (KTO, ("PrefixTuning",), OF_ANSWERS_AND_METHODS),
            ({"type": "ORPO"}, ("PromptTuning",), OF_ANSWERS_AND_METHODS),
            (
                DISTILLATION,
                ("QLoRA", "PrefixTuning", "PromptTuning"),
                "Distillation works with method Full, LoRA or DoRA",
            ),
        )
        for method in methods
    },
    "DPO without preferences": (
        job(objective=DPO),
        "objective DPO, ORPO or SimPO needs data.columns of type Preference",
    ),
    "SimPO of judged answers": (
        job(data=prepared(columns=UNPAIRED), objective={"type": "SimPO"}),
        "objective DPO, ORPO or SimPO needs data.columns of type Preference",
    ),
    "the parameters of another objective": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"orpo": {}}),
        "orpo needs type ORPO",
    ),
    "smoothed IPO": (
        job(
            data=prepared(columns=PREFERENCES),
            objective=DPO | {"dpo": {"loss": "IPO", "labelSmoothing": 0.1}},
        ),
        "labelSmoothing needs loss: Sigmoid",
    ),
    "noise on virtual tokens": (
        job(method={"type": "PromptTuning"}, training={"packing": False, "neftuneAlpha": 5}),
        "training.neftuneAlpha works with method Full, LoRA, QLoRA or DoRA",
    ),
    "preferences without DPO": (
        job(data=prepared(columns=PREFERENCES)),
        "data.columns of type Preference needs objective.type DPO, ORPO or SimPO",
    ),
    "KTO without labels": (
        job(data=prepared(columns=PREFERENCES), objective=KTO),
        "objective KTO needs data.columns of type Unpaired",
    ),
    "labels without KTO": (
        job(data=prepared(columns=UNPAIRED)),
        "data.columns of type Unpaired needs objective.type KTO",
    ),
    "parameters of KTO without KTO": (job(objective={"kto": {"beta": 0.2}}), "kto needs type KTO"),
    "a label of pairs": (
        job(data=prepared(columns=PREFERENCES | {"label": "l"}), objective=DPO),
        "label needs type Unpaired",
    ),
    "a template of judged answers": (
        job(data=prepared(columns=UNPAIRED, promptTemplate="{p}", responseTemplate="{c}"), objective=KTO),
        "prepare.responseTemplate cannot be used with columns of type Preference or Unpaired",
    ),
    "a teacher without Distillation": (
        job(objective={"distillation": {"teacher": "/t"}}),
        "distillation and type Distillation require each other",
    ),
    "no teacher": (
        job(objective={"type": "Distillation"}),
        "distillation and type Distillation require each other",
    ),
    "a loss on the answer for DPO": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"lossOn": "All"}),
        "lossOn needs type SFT",
    ),
    "a loss on the answer of a text": (
        job(data=prepared(), objective={"lossOn": "Answer"}),
        "a text has no answer",
    ),
    "a loss on the last answer of a text": (
        job(data=prepared(), objective={"lossOn": "LastAnswer"}),
        "a text has no answer",
    ),
    "weights of a text's messages": (
        job(data=prepared(columns={"type": "Text", "messageWeight": "train"})),
        "messageWeight needs type Messages",
    ),
    "weights of messages beside a loss on all tokens": (
        job(
            data=prepared(columns={"type": "Messages", "messageWeight": "train"}), objective={"lossOn": "All"}
        ),
        "objective.lossOn All takes it on every token",
    ),
    "a template of both answers": (
        job(
            data=prepared(columns=PREFERENCES, promptTemplate="{p}", responseTemplate="{c}"),
            objective=DPO,
        ),
        "prepare.responseTemplate cannot be used with columns of type Preference or Unpaired",
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
            ("a version of files", {"type": "CSV", "path": "/a", "version": 1}, "version pins a Delta table"),
            (
                "a time of files",
                {"type": "Parquet", "path": "/a", "versionTime": "2026-11-01T00:00:00Z"},
                "versionTime pins a Delta table",
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
                "split needs type Hub",
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
                "a data set of the Hub in executor pods",
                mixed(type="Hub", path=None, dataset="org/name"),
                {"spark": {"mode": "Kubernetes"}},
                "source.type Hub needs prepare.spark.mode Local",
            ),
        )
    },
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
        job(data=prepared(unrenderable="Drop")),
        "prepare.unrenderable needs what a template can refuse",
    ),
    "Jinja without a template": (
        job(data=prepared(templateSyntax="Jinja")),
        "templateSyntax Jinja needs promptTemplate",
    ),
    "tools of a text": (
        job(data=prepared(columns={"type": "Text", "tools": "t"})),
        "tools needs type Messages",
    ),
    "a chat template of one's own that is not there": (
        job(model={"base": "org/base", "chatTemplate": {"type": "Jinja"}}),
        "chatTemplate.jinja needs type Jinja, and type Jinja needs jinja",
    ),
    "limits of the prompt in the wrong order": (
        job(data=found(minPromptChars=3, maxPromptChars=2)),
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
            ("the output", decontaminate({"path": "/data/out"}) | {"output": "/data/out"}, "has the output"),
            ("a run of words that is none", decontaminate({}, ngram=4), "greater than or equal to 5"),
            ("short texts that are long", decontaminate({}, minWords=20), "minWords must not be above ngram"),
            (
                "a data set of the Hub in executor pods",
                decontaminate({"type": "Hub", "path": None, "dataset": "org/name"})
                | {"output": "s3://splits/a", "spark": {"mode": "Kubernetes"}},
                "decontaminate.sources of type Hub need spark.mode Local",
            ),
            (
                "a folder of one pod",
                decontaminate({}) | {"output": "s3://splits/a", "spark": {"mode": "Kubernetes"}},
                "the path in decontaminate.sources is a folder of one pod",
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
        "conf takes settings of the work",
    ),
    "output over the source": (
        job(data=prepared(output="/data/corpus")),
        "prepare.output is the source itself",
    ),
    "executors that share no output": (
        job(data=on_executors("s3://corpus/a", "/data/splits")),
        "output is a folder of one pod: with spark.mode Kubernetes or SparkApplication use s3://bucket/folder",
    ),
    "a SparkApplication that shares no output": (
        job(data=on_executors("s3://corpus/a", "/data/splits", spark={"mode": "SparkApplication"})),
        "output is a folder of one pod: with spark.mode Kubernetes or SparkApplication use s3://bucket/folder",
    ),
    "a SparkApplication on Databricks": (
        job(
            data=prepared(
                output="s3://splits/a",
                spark={"mode": "SparkApplication", "databricks": {"volume": "/Volumes/a/b/c"}},
            )
        ),
        "databricks needs mode Databricks",
    ),
    "executors that share no source": (
        job(data=on_executors("/data/corpus", "s3://splits/a")),
        "source.path is a folder of one pod: with prepare.spark.mode Kubernetes or SparkApplication use s3://bucket/folder",
    ),
    "executors in one pod": (
        job(data=prepared(spark={"executors": 2})),
        "executors, executorCores and executorMemory need mode Kubernetes or SparkApplication",
    ),
    "an account that creates no pods": (
        job(data=prepared(spark={"serviceAccountName": "a"})),
        "serviceAccountName needs mode Kubernetes or SparkApplication",
    ),
    **{
        f"to resume from {what}": (
            job(checkpoint={"uri": "/c", "resumeFrom": place}, trainer={"command": command}),
            sentence,
        )
        for what, place, command, sentence in (
            ("a job without a name", {"type": "Job"}, [], "name and type Job require each other"),
            ("a place without one", {"type": "Uri"}, [], "uri and type Uri require each other"),
            ("both", {"type": "Uri", "uri": "/c/a", "name": "a"}, [], "name and type Job require each other"),
            (
                "a relative path",
                {"type": "Uri", "uri": "c/a"},
                [],
                "uri is s3://bucket/folder, gs://bucket/folder, abfss://",
            ),
            (
                "a bucket",
                {"type": "Uri", "uri": "s3://bucket"},
                [],
                "uri is s3://bucket/folder, gs://bucket/folder, abfss://",
            ),
            (
                "a workspace",
                {"type": "Uri", "uri": "/Volumes/a/b/c"},
                [],
                NO_LOGIN,
            ),
            ("DBFS", {"type": "Uri", "uri": "/dbfs/a"}, [], IN_DBFS),
            (
                "a script",
                {"type": "Job", "name": "a"},
                ["torchrun", "a.py"],
                "checkpoint.resumeFrom needs the built-in loop",
            ),
            ("itself", {"type": "Job", "name": "tune"}, [], "checkpoint.resumeFrom names this job"),
        )
    },
    "an adapter that goes on as a model": (
        job(model={"base": "models:/m@a", "adapter": "Continue"}),
        "model.adapter: Continue needs method LoRA, QLoRA or DoRA",
    ),
    "an adapter that goes on with other layers": (
        job(
            model={"base": "models:/m@a", "adapter": "Continue"}, method={"type": "LoRA", "lora": {"rank": 8}}
        ),
        "model.adapter: Continue keeps the rank, the scale and the layers of the adapter: remove method.lora",
    ),
    **{
        f"PiSSA with {method}": (
            job(method={"type": method, "lora": {"init": "PiSSA"}}),
            "lora.init: PiSSA needs type LoRA: it changes the frozen weights, which QLoRA rounds to four bits and DoRA takes norms of",
        )
        for method in ("QLoRA", "DoRA")
    },
    "PiSSA of a rank whose double no adapter may have": (
        job(method={"type": "LoRA", "lora": {"init": "PiSSA", "rank": 513}}),
        "rank is at most 512 with init: PiSSA, whose registered adapter has twice the rank: lower it",
    ),
    "a layer that is adapted and trained whole": (
        job(method={"type": "LoRA", "lora": {"targetModules": ["lm_head"], "modulesToSave": ["lm_head"]}}),
        "a layer of modulesToSave is trained whole and has no adapter: remove it from targetModules",
    ),
    "new tokens in an adapter that goes on": (
        job(
            model={"base": "models:/m@a", "adapter": "Continue", "newTokens": ["<a>"]},
            method={"type": "LoRA"},
        ),
        "adapter: Continue keeps the vocabulary that the adapter was trained with: remove newTokens, or set adapter: Merge",
    ),
    "new tokens in an adapter alone": (
        job(model={"base": "org/base", "newTokens": ["<a>"]}, method={"type": "LoRA"}),
        "model.newTokens with an adapter needs method.export: Merged, since the base has no rows for them",
    ),
    "new tokens under virtual ones": (
        job(
            model={"base": "org/base", "newTokens": ["<a>"]},
            method={"type": "PromptTuning"},
            training={"packing": False},
        ),
        "model.newTokens works with method Full, LoRA, QLoRA or DoRA: virtual tokens train no embedding",
    ),
    "new tokens that a teacher does not have": (
        job(model={"base": "org/base", "newTokens": ["<a>"]}, objective=DISTILLATION),
        "model.newTokens does not work with objective Distillation, whose teacher has no rows for them",
    ),
    "the best of no evaluations": (
        job(training={"select": "Best"}),
        "select: Best needs evaluations during training: set training.evalEverySteps",
    ),
    **{
        f"the name of {what}": (body, sentence)
        for what, body, sentence in (
            ("a Secret", job(tracking={"secretRef": {"name": " "}}), OBJECT),
            ("a Secret in capitals", job(trainer={"envFrom": [{"secretRef": {"name": "Hub"}}]}), OBJECT),
            ("a ConfigMap", job(trainer={"envFrom": [{"configMapRef": {"name": "-a"}}]}), OBJECT),
            ("a ConfigMap of code", job(trainer=code(configMapRef={"name": "a_b"})), OBJECT),
            ("a volume", job(trainer=code(volume="a.b")), "the name of a volume must have lowercase letters"),
            ("a queue", job(runPolicy={"queueName": "a b"}), "the name of a queue becomes a label"),
            ("a long queue", job(runPolicy={"queueName": "q" * 64}), "may not be more than 63"),
            ("a variable", job(trainer={"env": [{"name": "1ST", "value": "a"}]}), VARIABLE),
            ("two variables", job(trainer={"env": [{"name": "A=B", "value": "a"}]}), VARIABLE),
            ("a prefix", job(trainer={"envFrom": [{"prefix": "a b", "secretRef": {"name": "s"}}]}), VARIABLE),
            ("a variable of NCCL", job(distributed={"nccl": {"NCCL DEBUG": "INFO"}}), VARIABLE),
            ("an image", job(trainer={"image": " "}), "the name of an image must not have spaces"),
        )
    },
    "a variable from two places": (
        job(trainer={"env": [{"name": "A", "value": "a", "valueFrom": {"fieldRef": {}}}]}),
        "set value or valueFrom, not both",
    ),
    **{
        f"{what} twice": (body, "Duplicate value")
        for what, body in (
            ("a variable", job(trainer={"env": [{"name": "A", "value": "a"}, {"name": "A", "value": "b"}]})),
            ("a variable of the preparation", job(data=prepared(env=[{"name": "A", "value": "a"}] * 2))),
            ("an alias", job(register={"model": "m", "aliases": ["a", "a"]})),
            ("a column", job(data=prepared(notNull=["a", "a"]))),
            ("a fatal exit code", job(runPolicy={"fatalExitCodes": [3, 3]})),
            ("an exit code to retry", job(runPolicy={"retryableExitCodes": [3, 3]})),
            ("a layer", job(method={"type": "LoRA", "lora": {"targetModules": ["q_proj", "q_proj"]}})),
        )
    },
    **{
        f"a schedule with {what}": (job(training=training), sentence)
        for what, training, sentence in (
            (
                "two lengths of its decay",
                {"scheduler": "WSD", "decaySteps": 9, "decayRatio": 0.1},
                "set decaySteps or decayRatio, not both",
            ),
            (
                "steps of no decay",
                {"scheduler": "Linear", "decaySteps": 9},
                "decaySteps needs scheduler: WSD",
            ),
            ("a share of no decay", {"decayRatio": 0.1}, "decayRatio needs scheduler: WSD"),
            (
                "shares above 1",
                {"scheduler": "WSD", "warmupRatio": 0.6, "decayRatio": 0.5},
                "warmupRatio and decayRatio together are above 1: lower one of them",
            ),
            (
                "more steps than the run",
                {"scheduler": "WSD", "warmupSteps": 2, "decaySteps": 9, "maxSteps": 10},
                "the warm-up and the decay are longer than maxSteps: lower decaySteps or warmupSteps",
            ),
            (
                "a floor of nothing that decreases",
                {"scheduler": "Constant", "minLearningRate": 0},
                "minLearningRate needs a learning rate that decreases",
            ),
            (
                "a floor at its peak",
                {"learningRate": 1e-4, "minLearningRate": 1e-4},
                "minLearningRate must be below learningRate: lower it",
            ),
        )
    },
    **{
        f"{name} {value} of the optimizer": (
            job(training={"optimizer": {name: value}}),
            f"spec.training.optimizer.{name}",
        )
        for name, value in (("beta1", 1), ("beta2", -0.1), ("epsilon", 0))
    },
    "momentum of AdamW": (
        job(training={"optimizer": {"momentum": 0.9}}),
        "momentum needs type Muon",
    ),
    "Muon for bf16 weights": (
        job(training={"optimizer": {"type": "Muon", "weights": "BF16"}}),
        "weights: BF16 needs type AdamW or AdamW8bit",
    ),
    "bf16 weights that compute in fp32": (
        job(training={"precision": "FP32", "optimizer": {"weights": "BF16"}}),
        "optimizer.weights: BF16 needs precision: BF16",
    ),
    "bf16 weights of an adapter": (
        job(method={"type": "LoRA"}, training={"optimizer": {"weights": "BF16"}}),
        "optimizer.weights: BF16 needs method Full",
    ),
    "Muon for an adapter": (
        job(method={"type": "LoRA"}, training={"optimizer": {"type": "Muon"}}),
        "optimizer.type: Muon needs method Full: set AdamW or AdamW8bit",
    ),
    "label smoothing of targets for DPO": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"labelSmoothing": 0.1}),
        "labelSmoothing needs type SFT: for DPO set dpo.labelSmoothing",
    ),
    "half of the pairs the wrong way round": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"labelSmoothing": 0.5}}),
        "spec.objective.dpo.labelSmoothing",
    ),
    "stopping early without evaluations": (
        job(training={"earlyStopping": {}}),
        "earlyStopping needs evaluations during training: set training.evalEverySteps",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_THE_SCHEMA)
def test_the_schema_refuses(api: Api, namespace: str, case: str) -> None:
    body, sentence = REFUSED_BY_THE_SCHEMA[case]
    body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    with refused(sentence):
        api.create(body)


TAKEN_BY_THE_SCHEMA: dict[str, Json] = {
    **{method: job(method={"type": method}) for method in ("Full", "LoRA", "QLoRA", "DoRA")},
    **{
        method: job(method={"type": method, "softPrompt": {"virtualTokens": 8}}, training=NO_PACKS)
        for method in ("PrefixTuning", "PromptTuning")
    },
    "a prompt that starts from a text": job(
        method={"type": "PromptTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS
    ),
    "DPO": job(data=prepared(columns=PREFERENCES, promptTemplate="Q: {p}"), objective=DPO),
    "IPO": job(data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"loss": "IPO"}}),
    "ORPO, with noise": job(
        data=prepared(columns=PREFERENCES), objective={"type": "ORPO"}, training={"neftuneAlpha": 5}
    ),
    "SimPO": job(data=prepared(columns=PREFERENCES), objective={"type": "SimPO", "simpo": {"gamma": 0}}),
    "KTO": job(
        data=prepared(columns=UNPAIRED, promptTemplate="Q: {prompt}", minPromptChars=2, conversation={}),
        objective=KTO | {"kto": {"beta": 0.2, "desirableWeight": 1.3}},
        method={"type": "QLoRA"},
    ),
    "a mix of sources": job(data=prepared() | {"source": mixed()}),
    "limits of the prompt, and columns of duplicates": job(
        data=found(minPromptChars=2, maxPromptChars=9, dedupe={"columns": ["prompt"]})
    ),
    "evaluation sets": job(
        data=prepared(**decontaminate({"version": 3, "columns": ["a"]}, ngram=5, minWords=5))
    ),
    "languages": job(data=prepared(languages=["en", "de"])),
    "redaction": job(data=prepared(redact=["Email", "Phone", "CardNumber", "Secret"])),
    "a version at a time": source(type="Delta", path="/a", versionTime="2026-11-01T00:00:00+01:00"),
    "code of a repository, and packages": job(
        trainer={
            **code(git={"url": "https://host:8443/owner/code.git", "revision": "release/1.0"}),
            "dependencies": [
                "datasets >=3, <5",
                "trl[peft,vllm]~=1.0; python_version < '3.13'",
                "flash-attn",
                "torch (==2.13.0+cu130)",
                "code @ git+https://host/owner/code.git@v1",
                "wheel @ file:///wheels/wheel-1.0-py3-none-any.whl ; sys_platform == 'linux'",
            ],
        }
    ),
    "a split of the Hub": source(type="Hub", dataset="org/name", config="en", split="train", revision="main"),
    "settings of Spark": job(
        data=prepared(
            spark={"conf": {"spark.sql.shuffle.partitions": "9", "spark.hadoop.fs.s3a.threads.max": "9"}}
        )
    ),
    "columns that are found in the data": job(data=found()),
    "preferences that are found in the data": job(data=found(promptTemplate="Q: {prompt}"), objective=DPO),
    "an answer in columns that are found": job(
        data={"splits": {"type": "Delta", "path": "/x"}}, objective={"lossOn": "Answer"}
    ),
    "models on a claim, on CPUs": job(
        model={"base": "org/base", "cache": {"claimName": "models"}}, distributed={"device": "CPU"}
    ),
    "DPO with QLoRA": job(
        data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"beta": 0.2}}, method={"type": "QLoRA"}
    ),
    "executors on S3": job(data=on_executors("s3://corpus/a", "s3://splits/a")),
    "executors on a volume": job(data=on_executors("/data/corpus", "/data/splits", podTemplate={})),
    "Distillation with DoRA": job(objective=DISTILLATION, method={"type": "DoRA"}),
    "the answer of a templated text": job(
        data=prepared(promptTemplate="{title}", responseTemplate="{text}"), objective={"lossOn": "Answer"}
    ),
    "an adapter that goes on": job(
        model={"base": "models:/m@a", "adapter": "Continue"}, method={"type": "DoRA"}
    ),
    "new tokens": job(model={"base": "org/base", "newTokens": ["<a>", "</a>"]}),
    "new tokens in a merged adapter, with layers of its own": job(
        model={"base": "org/base", "newTokens": ["<a>"]},
        method={"type": "QLoRA", "export": "Merged", "lora": {"bias": "All", "modulesToSave": ["lm_head"]}},
    ),
    "to resume from a job": job(checkpoint={"resumeFrom": {"type": "Job", "name": "another"}}),
    "to resume from a place": job(
        checkpoint={"uri": "/c", "resumeFrom": {"type": "Uri", "uri": "s3://bucket/c/a"}}
    ),
    "the best of some": job(
        training={"select": "Best", "evalEverySteps": 5, "earlyStopping": {"patience": 2}}
    ),
    "a schedule in all its parts": job(
        training={
            "scheduler": "WSD",
            "warmupSteps": 2,
            "decaySteps": 8,
            "maxSteps": 10,
            "learningRate": 1e-4,
            "minLearningRate": 1e-5,
            "optimizer": {"beta1": 0, "beta2": 0.95, "epsilon": 1e-6},
        },
        objective={"labelSmoothing": 0.1},
    ),
    "8 bits and bf16 weights": job(
        training={"optimizer": {"type": "AdamW8bit", "weights": "BF16", "beta2": 0.95}, "precision": "BF16"}
    ),
    "8 bits for an adapter": job(
        method={"type": "QLoRA"}, training={"optimizer": {"type": "AdamW8bit"}, "precision": "FP16"}
    ),
    "Muon": job(training={"optimizer": {"type": "Muon", "momentum": 0.9}, "precision": "FP16"}),
    "shares of a schedule": job(
        training={"scheduler": "WSD", "warmupRatio": 0.7, "decayRatio": 0.3, "minLearningRate": 1}
    ),
    "an evaluation of files": evaluated(
        {"metrics": ["Loss", "Accuracy"], "limit": 100, "generations": 0},
        data={"splits": {"type": "JSONLines", "train": "/x", "test": "/y"}},
    ),
    "a command without a test split": evaluated(
        {"command": ["judge"], "parameters": {"task": "a"}},
        data=prepared(splitRatios={"train": 0.9, "validation": 0.1, "test": 0}),
    ),
    "label smoothing of pairs": job(
        data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"labelSmoothing": 0.1}}
    ),
    "names of all kinds": job(
        trainer={
            **code(configMapRef={"name": "my.code-1"}),
            "image": "registry.example.org:5000/team/trainer@sha256:0123",
            "env": [{"name": "_A.b-1", "value": "a"}, {"name": ".B", "valueFrom": {"fieldRef": {}}}],
            "envFrom": [{"prefix": "S3_", "secretRef": {"name": "0.s3.login"}}],
        },
        runPolicy={"queueName": "team-a.gpu"},
        distributed={"nccl": {"NCCL_DEBUG": "INFO"}},
    ),
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
    "all of the speed": job(
        training={"compile": True, "activationCheckpointing": "Auto"},
        distributed={"strategy": "HSDP", "nodes": 2, "processesPerNode": 2},
        tracking={"systemMetrics": True},
    ),
}


@pytest.mark.parametrize("case", TAKEN_BY_THE_SCHEMA)
def test_the_schema_takes(api: Api, namespace: str, case: str) -> None:
    body = TAKEN_BY_THE_SCHEMA[case]
    assert api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


def test_what_two_writers_apply_to_a_set_is_all_there(plane: Plane, namespace: str, api: Api) -> None:
    body = job(runPolicy={"retryableExitCodes": [1, 2]})
    part = {key: body[key] for key in ("apiVersion", "kind", "metadata")}
    part["spec"] = {**body["spec"], "runPolicy": {"retryableExitCodes": [2, 3]}}
    for writer, content in (("git", body), ("team", part)):
        apply = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", namespace, "apply"]
        apply += ["--server-side", "--field-manager", writer, "--filename", "-"]
        subprocess.run(apply, input=json.dumps(content), text=True, check=True, capture_output=True)
    kept = api.get("FineTuneJob", namespace, "tune") or {}
    assert sorted(kept["spec"]["runPolicy"]["retryableExitCodes"]) == [1, 2, 3]


CHANGES: dict[str, tuple[Json, str | None]] = {
    "training": ({"training": {"seed": 7}}, "spec.training cannot change once the job exists"),
    "a part that was not there": ({"checkpoint": {"uri": "/other"}}, "spec.checkpoint cannot change"),
    "a part taken away": ({"register": None}, "spec.register cannot change"),
    "suspend": ({"suspend": True}, None),
    "runPolicy": ({"runPolicy": {"maxRestarts": 9}}, None),
    "podTemplate": ({"podTemplate": {"spec": {"nodeSelector": {"pool": "spare"}}}}, None),
    "credentials": (
        {"envFrom": [{"secretRef": {"name": "new"}}], "env": [{"name": "A", "value": "b"}]},
        None,
    ),
    "the image and variables of a part": (
        {
            "trainer": {"image": "me/mine:2", "env": [{"name": "A", "value": "b"}]},
            "data": {
                "prepare": {"image": "me/mine:2", "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}
            },
        },
        None,
    ),
    "a command": ({"trainer": {"command": ["mine"]}}, "spec.trainer.command cannot change"),
    "an output": ({"output": {"uri": "s3://a/b"}}, "spec.output cannot change"),
    "a filter": ({"data": {"prepare": {"filter": "a = 1"}}}, "spec.data.prepare.filter cannot change"),
    "the source": ({"data": {"source": {"path": "/other"}}}, "spec.data.source cannot change"),
    "no preparation": ({"data": {"prepare": None}}, "spec.data.prepare cannot change"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_spec_is_immutable_but_for_what_the_next_attempt_can_take_up(
    api: Api, namespace: str, case: str
) -> None:
    change, sentence = CHANGES[case]
    body = job()
    api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})
    if sentence is None:
        assert api.patch("FineTuneJob", namespace, "tune", {"spec": change})
        return
    with refused(sentence):
        api.patch("FineTuneJob", namespace, "tune", {"spec": change})


def test_a_wrong_recipe_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(splits_given())
    sentence = "model.base /models/base does not exist in the pod: mount the volume in podTemplate"
    world.run_pods("tune-train-1", 2)
    world.end_pods(
        "tune-train-1", [64, 64], [error("ModelNotFound", sentence), error("ModelNotFound", sentence)]
    )
    status = world.wait_phase("tune", "Failed")
    assert status["restarts"] == 0
    assert {key: status["lastFailure"][key] for key in ("exitCode", "reason", "message", "attempt")} == {
        "exitCode": 64,
        "reason": "ModelNotFound",
        "message": sentence,
        "attempt": 1,
    }
    failed = world.condition("tune", "Failed")
    assert failed["reason"] == "RecipeWrong"
    assert sentence in failed["message"]
    assert [job["metadata"]["name"] for job in world.api.list("Job", world.namespace)] == ["tune-train-1"]
    wait_for("a Warning Event", lambda: world.events("RecipeWrong"))
    world.wait_condition("tune", "Tracked", "RunFinished")
    runs = world.mlflow.runs_of(world.job("tune")["metadata"]["uid"])
    assert [run["info"]["status"] for run in runs] == ["FAILED"]


def test_wrong_data_fails_at_once_with_the_pods_sentence(world: World) -> None:
    world.submit(job())
    sentence = "the source /data/corpus has no column answer; it has: question, reply"
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [65], [error("MissingColumn", sentence)])
    status = world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "DataWrong"
    assert (status["lastFailure"]["exitCode"], status["lastFailure"]["message"]) == (65, sentence)


def test_what_is_not_implemented_is_refused_by_name(world: World) -> None:
    world.submit(job(tracking={"uri": "file:/runs"}))
    accepted = world.wait_condition("tune", "Accepted", "NotImplemented")
    assert (
        "tracking.uri file:/runs (use the http or https address of an MLflow server, or databricks)"
        in accepted["message"]
    )
    assert world.api.list("Job", world.namespace) == []


def test_reserved_environment_in_a_pod_template_is_refused(world: World) -> None:
    containers = [{"name": "trainer", "env": [{"name": "WORLD_SIZE", "value": "1"}]}]
    world.submit(splits_given(podTemplate={"spec": {"containers": containers}}))
    message = "spec.podTemplate sets WORLD_SIZE, which the operator sets: remove it"
    assert world.wait_condition("tune", "Accepted", "InvalidSpec")["message"] == message
    assert holding(world) == ["Stalled"]
    change(world, podTemplate=None)
    world.run_pods("tune-train-1", 2)


def test_registering_without_a_server_waits_until_the_installation_has_one(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    settings = watching(namespace, "")
    with running(operator_process(kubeconfig, tmp_path / "without.log", settings)):
        world = World(api, mlflow_server, namespace)
        world.submit(splits_given())
        found = world.wait_condition("tune", "Accepted", "MlflowNotConfigured")
        assert found["message"].startswith("spec.register needs an MLflow server: install the chart with")
        assert holding(world) == ["Reconciling"]
    settings = watching(namespace, mlflow_server.uri)
    with running(operator_process(kubeconfig, tmp_path / "with.log", settings)):
        world.run_pods("tune-train-1", 2)
        world.delete_all()


def holding(world: World, name: str = "tune") -> list[str]:
    """Which conditions of the summary are True."""
    conditions = world.status(name)["conditions"]
    return [
        item["type"]
        for item in conditions
        if item["type"] in ("Ready", "Reconciling", "Stalled", "Finished") and item["status"] == "True"
    ]


def change(world: World, **spec: Any) -> None:
    """Change parts of the spec; None takes a part away."""
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": spec})


GPU: Json = {"limits": {"cpu": "1"}}
TYPO: Json = {"spec": {"containers": [{"name": "trainer", "resource": GPU}]}}
RIGHT: Json = {"spec": {"containers": [{"name": "trainer", "resources": GPU}]}}
PRIVILEGED: Json = {
    "spec": {
        "containers": [
            {"name": "trainer", "securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}
        ]
    }
}


@pytest.mark.parametrize(("body", "first"), [(job, ("tune-prep", 1)), (splits_given, ("tune-train-1", 2))])
def test_a_typo_in_a_pod_template_is_told_at_once_until_it_is_corrected(
    world: World, body: Callable[..., Json], first: tuple[str, int]
) -> None:
    world.submit(body(podTemplate=TYPO))
    found = world.wait_condition("tune", "PodsAdmitted", "PodTemplateInvalid")
    assert re.search('unknown field "spec[.](template[.]spec[.])?containers.0.[.]resource"', found["message"])
    assert (holding(world), children(world)) == (["Stalled"], [])
    change(world, podTemplate=RIGHT)
    world.run_pods(*first)
    wait_for("it goes on", lambda: holding(world) == ["Reconciling"])


@pytest.mark.parametrize(("body", "first"), [(job, ("tune-prep", 1)), (splits_given, ("tune-train-1", 2))])
def test_a_policy_that_forbids_the_pods_is_told_before_anything_is_created(
    world: World, body: Callable[..., Json], first: tuple[str, int]
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    world.api.patch("Namespace", "", world.namespace, {"metadata": {"labels": label}})
    world.submit(body(podTemplate=PRIVILEGED))
    found = world.wait_condition("tune", "PodsAdmitted", "PodRejected")
    assert 'violates PodSecurity "restricted:latest"' in found["message"]
    assert "correct spec.podTemplate" in found["message"]
    assert (holding(world), children(world)) == (["Reconciling"], [])
    change(world, podTemplate=None)
    world.run_pods(*first)


def test_what_the_pods_lack_may_come_while_the_spec_stays(world: World) -> None:
    name = f"late-{world.namespace}"
    world.submit(job(podTemplate={"spec": {"priorityClassName": name}}))
    found = world.wait_condition("tune", "PodsAdmitted", "PodRejected")
    assert f"no PriorityClass with name {name} was found" in found["message"]
    assert (holding(world), children(world)) == (["Reconciling"], [])
    late = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
    world.api.create({**late, "value": 1})
    world.run_pods("tune-prep", 1)
    world.wait_condition("tune", "PodsAdmitted", "PodsAdmitted")
    world.api.delete("PriorityClass", "", name)


def test_a_service_account_that_is_missing_is_told_and_waited_for(world: World) -> None:
    world.submit(job(serviceAccountName="late"))
    found = world.wait_condition("tune", "PodsAdmitted", "CheckFailed")
    assert 'serviceaccount "late" not found' in found["message"]
    assert (found["status"], holding(world), children(world)) == ("Unknown", ["Reconciling"], [])
    meta = {"name": "late", "namespace": world.namespace}
    world.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    world.run_pods("tune-prep", 1)


@pytest.mark.parametrize(
    "rule",
    [
        "has(object.metadata.ownerReferences) && object.metadata.ownerReferences.exists(o, o.controller)",
        "'batch.kubernetes.io/job-name' in object.metadata.labels",
        "'batch.kubernetes.io/job-completion-index' in object.metadata.annotations",
    ],
)
def test_a_policy_against_pods_that_nothing_controls_refuses_no_training_pod(
    world: World, plane: Plane, rule: str
) -> None:
    name = f"naked-{world.namespace}"
    metadata = {"name": name}
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    where = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    group = "admissionregistration.k8s.io/v1"
    constraints = {"resourceRules": rules, "namespaceSelector": where}
    no_field = "has(object.metadata.labels) && has(object.metadata.annotations)"
    policy = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "matchConstraints": constraints,
            "validations": [{"expression": f"{no_field} && {rule}", "message": "naked pods are not allowed"}],
        },
    }
    binding = {
        "apiVersion": group,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    try:
        world.api.create(policy)
        world.api.create(binding)
        wait_for("the policy counts", lambda: "naked pods" in naked_pod(world, plane))
        world.submit(job())
        assert world.wait_condition("tune", "PodsAdmitted", "PodsAdmitted")["status"] == "True"
    finally:
        for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
            world.api.delete(kind, "", name)


def naked_pod(world: World, plane: Plane) -> str:
    """What the API server says of a pod with the fields that a rule reads, which nothing controls."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "naked", "labels": {"a": "b"}, "annotations": {"a": "b"}},
        "spec": {"containers": [{"name": "a", "image": "a"}]},
    }
    create = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", world.namespace]
    create += ["create", "--dry-run=server", "--filename", "-"]
    return subprocess.run(create, input=json.dumps(body), text=True, check=False, capture_output=True).stderr


def children(world: World) -> list[str]:
    """The kinds of what the operator has created."""
    kinds = ("Job", "Service", "ConfigMap")
    selector = "app.kubernetes.io/managed-by=finetune-operator"
    return [kind for kind in kinds if world.api.list(kind, world.namespace, selector)]


def test_a_quota_that_is_used_up_is_told_before_the_preparation_which_goes_on(world: World) -> None:
    # The pod of the preparation fits, and one that asks for a CPU does not.
    limit(world, {"limits.cpu": "500m"})
    small = {"spec": {"containers": [{"name": "prep", "resources": {"limits": {"cpu": "100m"}}}]}}
    large = {"spec": {"containers": [{"name": "trainer", "resources": GPU}]}}
    world.submit(job(data=prepared(podTemplate=small), podTemplate=large))
    found = world.wait_condition("tune", "PodsAdmitted", "QuotaExceeded")
    assert "exceeded quota: few, requested: limits.cpu=1" in found["message"]
    world.run_pods("tune-prep", 1)
    assert holding(world) == ["Reconciling"]
    assert world.condition("tune", "Ready")["reason"] == "QuotaExceeded"
    world.end_pods("tune-prep", [0], [PREPARED])
    world.wait_condition("tune", "PodsHealthy", "PodRejected")
    world.api.delete("ResourceQuota", world.namespace, "few")
    world.run_pods("tune-train-1", 2)
    assert world.condition("tune", "PodsAdmitted") == {}


def limit(world: World, hard: Json) -> None:
    """Create a quota, and wait until it counts."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": world.namespace},
        "spec": {"hard": hard},
    }
    world.api.create(quota)
    wait_for(
        "the quota counts",
        lambda: (world.api.get("ResourceQuota", world.namespace, "few") or {}).get("status", {}).get("hard"),
    )


def test_pods_that_cannot_run_are_named_with_the_reason(world: World) -> None:
    world.submit(splits_given())
    first, second = world.wait_pods("tune-train-1", 2)
    world.set_waiting(second, "ImagePullBackOff", 'Back-off pulling image "nowhere/none:1"')
    found = world.wait_condition("tune", "PodsHealthy", "ImagePullFailed")
    assert second["metadata"]["name"] in found["message"]
    assert "nowhere/none:1" in found["message"]
    waiting = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes: no GPU",
    }
    meta = first["metadata"]
    world.api.patch(
        "Pod", meta["namespace"], meta["name"], {"status": {"conditions": [waiting]}}, status=True
    )
    found = world.wait_condition("tune", "PodsHealthy", "Unschedulable")
    assert found["message"].startswith(f"pod {meta['name']} cannot be scheduled: 0/2 nodes: no GPU")


def test_pods_that_the_api_server_rejects_are_explained(world: World) -> None:
    limit(world, {"pods": "0"})
    world.submit(splits_given())
    found = world.wait_condition("tune", "PodsHealthy", "PodRejected")
    assert "exceeded quota: few" in found["message"]


def test_a_child_name_that_is_taken_is_said(world: World) -> None:
    world.api.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "tune", "namespace": world.namespace},
            "spec": {"ports": [{"port": 80}]},
        }
    )
    world.submit(splits_given())
    found = world.wait_condition("tune", "PodsHealthy", "NameTaken")
    assert found["message"].startswith("Service tune exists and belongs to something else")
    world.api.delete("Service", world.namespace, "tune")
    world.run_pods("tune-train-1", 2)


def test_a_script_that_registers_nothing_is_told_so(world: World) -> None:
    world.submit(splits_given())
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "RegistrationFailed"


def test_mlflow_away_at_the_start_is_waited_for_and_away_later_stops_nothing(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path)
    operator = operator_process(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(operator):
        world = World(api, server, namespace)
        world.submit(job())
        world.run_pods("tune-prep", 1)
        world.end_pods("tune-prep", [0], [PREPARED])
        found = world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert found["message"].startswith(f"MLflow at {server.uri} cannot be reached")
        waiting = world.wait_condition("tune", "Trained", "MlflowUnreachable")
        assert waiting["message"].startswith("training waits for MLflow")
        with running(server):
            world.run_pods("tune-train-1", 2)
            world.wait_condition("tune", "Tracked", "RunReady")
            run_id = world.status("tune")["mlflow"]["runId"]
        world.wait_condition("tune", "Tracked", "MlflowUnreachable")
        assert world.wait_phase("tune", "Training")["attempt"] == 1
        with running(server):
            server.register(world.model, run_id)
            world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
            world.wait_phase("tune", "Succeeded")


TABLE: Json = {"type": "Delta", "table": "main.llm.chats"}
WITHOUT_OUTPUT: dict[str, tuple[Json, Json]] = {
    "executors": (TABLE, {"spark": {"mode": "Kubernetes"}}),
    "Databricks": (TABLE, {"spark": {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}}),
    "evaluation sets": (
        TABLE,
        {"decontaminate": {"sources": [{"name": "a", "type": "CSV", "path": "s3://e/a"}]}},
    ),
}


@pytest.mark.parametrize("case", WITHOUT_OUTPUT)
def test_the_output_may_be_that_of_the_installation(api: Api, namespace: str, case: str) -> None:
    source, prepare = WITHOUT_OUTPUT[case]
    body = job(data={"source": source, "prepare": prepare}, model={"base": "org/base"})
    api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


def test_mlflow_that_refuses_its_host_name_says_what_to_set(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    server = Mlflow(tmp_path, allowed_hosts="mlflow.example.org")
    operator = operator_process(kubeconfig, tmp_path / "operator.log", watching(namespace, server.uri))
    with running(server), running(operator):
        world = World(api, server, namespace)
        world.submit(splits_given())
        found = world.wait_condition("tune", "Tracked", "MlflowHostNotAllowed")
        assert f"--allowed-hosts '127.0.0.1:{server.port}'" in found["message"]


def test_a_missing_tracking_secret_is_named(world: World) -> None:
    tracking = {"uri": f"http://127.0.0.1:{free_port()}", "secretRef": {"name": "absent"}}
    world.submit(splits_given(tracking=tracking))
    found = world.wait_condition("tune", "Tracked", "CredentialsMissing")
    assert found["message"].startswith("Secret absent of spec.tracking.secretRef does not exist")
    waiting = world.wait_condition("tune", "Trained", "CredentialsMissing")
    assert waiting["message"].startswith("training waits for MLflow: Secret absent")
    assert holding(world) == ["Reconciling"]
    assert world.condition("tune", "Ready")["reason"] == "CredentialsMissing"
