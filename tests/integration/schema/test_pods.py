"""What the API server refuses and accepts of a job around its training: pods, names, code, outputs, evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import ENV_NAME, SUBDOMAIN
from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import AT_DATABRICKS, IN_DBFS, KTO, NO_LOGIN, NO_PACKS, prepared
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]


def code(**source: Any) -> Json:
    """spec.trainer with the user's own code."""
    return {"command": ["python"], "code": source}


def evaluated(evaluation: Json, **spec: Any) -> Json:
    """A job that registers a version and evaluates it."""
    return job(evaluation=evaluation, **({"register": {}} | spec))


SCRIPT: Json = {"command": ["torchrun", "a.py"]}
OBJECT = f"in body should match '^{SUBDOMAIN}$'"
VARIABLE = f"in body should match '^{ENV_NAME}$'"
SCOPED: Json = {"env": [{"name": "TOKEN", "value": "{{secrets/hub/token}}"}]}
NO_SCOPE = "{{secrets/scope/key}} is resolved only at Databricks: use valueFrom.secretKeyRef or envFrom"


ROLES = ("all", "prepare", "train", "evaluate")


def of_pods(role: str, **settings: Any) -> Json:
    """A job that prepares, trains and evaluates, with settings of its pods."""
    evaluation = {"command": ["judge"]}
    return job(data=prepared(), register={"model": "m"}, evaluation=evaluation, pods={role: settings})


REFUSED: dict[str, tuple[Json, str]] = {
    "a secret of a workspace in all pods": (of_pods("all", **SCOPED), NO_SCOPE),
    "a secret of a workspace in the trainer": (of_pods("train", **SCOPED), NO_SCOPE),
    "a secret of a workspace in the preparation": (of_pods("prepare", **SCOPED), NO_SCOPE),
    "a secret of a workspace in the evaluation": (of_pods("evaluate", **SCOPED), NO_SCOPE),
    "a secret of a workspace in the settings of Spark": (
        job(data=prepared(spark={"conf": {"spark.hadoop.fs.s3a.secret.key": "{{secrets/lake/key}}"}})),
        NO_SCOPE,
    ),
    **{
        f"an output {case}": (job(output=output, trainer=trainer), message)
        for case, output, trainer, message in (
            (
                "of a script without its folder",
                {"uri": "gs://models/support"},
                SCRIPT,
                "output.from, the folder that your command writes, such as /outputs, is required when trainer.command is set, and forbidden otherwise",
            ),
            (
                "of the built-in loop from a folder",
                {"uri": "gs://models/support", "from": "/outputs"},
                {},
                "output.from, the folder that your command writes, such as /outputs, is required when trainer.command is set, and forbidden otherwise",
            ),
            (
                "with a login of its own",
                {"uri": "gs://models/support", "secretRef": {"name": "store"}},
                {},
                "secretRef can be set only when from is set",
            ),
            *(
                (
                    f"from {folder} to {uri}",
                    {"uri": uri, "from": folder},
                    SCRIPT,
                    "output.from and output.uri overlap",
                )
                for folder, uri in (("/mnt/a", "/mnt/a"), ("/mnt/a/b", "/mnt/a"), ("/mnt/a", "/mnt/a/b"))
            ),
            *(
                (f"from {folder}", {"uri": "gs://models/support", "from": folder}, SCRIPT, message)
                for folder, message in (
                    ("outputs", "write the folder as an absolute path"),
                    ("/a/../outputs", "write the folder as an absolute path"),
                    ("/etc/finetune/outputs", "the operator or Kubernetes uses this folder"),
                    ("/var/run/finetune", "the operator or Kubernetes uses this folder"),
                    ("/dev/shm", "the operator or Kubernetes uses this folder"),
                )
            ),
            (
                "from the folder of the code",
                {"uri": "gs://models/support", "from": "/workspace/outputs"},
                {**SCRIPT, "code": {"configMapRef": {"name": "code"}}},
                "output.from is in trainer.code.mountPath, which is read-only",
            ),
        )
    },
    "an output in a store that cannot be written": (
        job(output={"uri": "hdfs://models/support"}),
        "uri must be s3://bucket/folder, gs://bucket/folder",
    ),
    "an output without a folder": (job(output={"uri": "gs://models"}), "uri must be s3://bucket/folder"),
    "an output in a workspace without its login": (job(output={"uri": "/Volumes/main/llm/models"}), NO_LOGIN),
    "an output in a workspace, and runs elsewhere": (
        job(output={"uri": "/Volumes/main/llm/models"}, tracking={"uri": "http://mlflow:5000"}),
        NO_LOGIN,
    ),
    "an output in DBFS": (job(output={"uri": "/dbfs/models"}, tracking=AT_DATABRICKS), IN_DBFS),
    **{
        f"an output {output} beside checkpoints {checkpoints}": (
            job(output={"uri": output}, checkpoint={"uri": checkpoints}),
            "output.uri and checkpoint.uri overlap",
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
        "register.upload must not be set when trainer.command is set",
    ),
    "checkpoints in a store that cannot be written": (
        job(checkpoint={"uri": "hdfs://a/b"}),
        "uri must be s3://bucket/folder, gs://bucket/folder",
    ),
    "nodes 0": (job(distributed={"nodes": 0}), "spec.distributed.nodes: Invalid value: 0"),
    "an evaluation without a version": (
        job(evaluation={}, register=None),
        "evaluation requires model, data and register: set all three",
    ),
    "an evaluation of unpaired answers": (
        evaluated({}, data=prepared(columns={"type": "Unpaired"}), objective=KTO),
        "the built-in evaluation does not support data.columns.type Unpaired: remove evaluation",
    ),
    **{
        f"{field} of a reward model": (
            evaluated(
                {field: value},
                data=prepared(columns={"type": "Preference"}),
                objective={"type": "RewardModel"},
            ),
            "a reward model generates no answers: set evaluation.metrics to Loss and Accuracy",
        )
        for field, value in (("metrics", ["Perplexity"]), ("generations", 5), ("maxNewTokens", 8))
    },
    "answers of texts": (
        evaluated({"metrics": ["Loss", "Rouge"]}, data=prepared()),
        "data.columns.type Text has no answers to compare: set evaluation.metrics to Loss and Perplexity",
    ),
    "an evaluation without a test split": (
        evaluated({}, data=prepared(splitRatios={"train": 0.9, "validation": 0.1, "test": 0})),
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0",
    ),
    "an evaluation without a validation split": (
        evaluated(
            {"split": "Validation"}, data=prepared(splitRatios={"train": 0.9, "validation": 0, "test": 0.1})
        ),
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0",
    ),
    "an evaluation without files of the test split": (
        evaluated({}, data={"splits": {"type": "Parquet", "train": "/x", "validation": "/y"}}),
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0, set its folder in data.splits",
    ),
    "an evaluation without files of the validation split": (
        evaluated({"split": "Validation"}, data={"splits": {"type": "Parquet", "train": "/x", "test": "/y"}}),
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0, set its folder in data.splits",
    ),
    "a command for virtual tokens": (
        evaluated({"command": ["judge"]}, method={"type": "PromptTuning"}, training=NO_PACKS),
        "evaluation.command must not be set when method.type is PrefixTuning or PromptTuning",
    ),
    **{
        f"{field} of the built-in evaluation beside a command": (
            evaluated({"command": ["judge"], field: value}),
            (
                "metrics, baseModel, limit, generations, maxNewTokens and batchSize must not be set when command is set"
            ),
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
    **{
        f"reserved environment of {role}": (
            of_pods(role, env=[{"name": "MASTER_ADDR", "value": "me"}]),
            "the operator sets MASTER_ADDR: remove it",
        )
        for role in ROLES
    },
    "where an evaluation finds the model": (
        of_pods("evaluate", env=[{"name": "MODEL_PATH", "value": "/m"}]),
        "the operator sets MODEL_PATH and METRICS_PATH: remove them from evaluate.env",
    ),
    "pods of a preparation without one": (
        job(data={"splits": {"type": "Parquet", "train": "/x"}}, pods={"prepare": {"image": "mine:1"}}),
        "pods.prepare can be set only when data.source is set",
    ),
    "a pod of an evaluation without one": (
        job(pods={"evaluate": {"image": "mine:1"}}),
        "pods.evaluate can be set only when evaluation is set",
    ),
    "name too long": (
        job("a" * 41),
        "metadata.name must have at most 40 lowercase letters, digits and '-', and begin with a letter",
    ),
    "name with a dot": (job("a.b"), "metadata.name must have at most 40"),
    "name that starts with a digit": (job("7b-sft"), "begin with a letter"),
    "args without command": (
        job(trainer={"args": ["--fast"]}),
        "args, code and dependencies can be set only when command is set, such as [torchrun, my_train.py]",
    ),
    "revision of a path": (
        job(model={"base": "/models/base", "revision": "main"}),
        "revision can be set only when base is a Hub id",
    ),
    "more processes than GPUs": (
        job(distributed={"gpusPerNode": 4, "processesPerNode": 8}),
        "processesPerNode must not be above gpusPerNode, since each process needs its own GPU",
    ),
    "GPUs for the CPU": (
        job(distributed={"gpusPerNode": 4, "device": "CPU"}),
        "gpusPerNode must not be set when device is CPU",
    ),
    "a product without GPUs": (
        job(distributed={"gpu": {"product": "A100"}}),
        "gpu can be set only when gpusPerNode is set",
    ),
    "a product of another maker": (
        job(distributed={"gpusPerNode": 1, "gpu": {"resourceName": "amd.com/gpu", "product": "MI300X"}}),
        "product is a label of NVIDIA's GPU feature discovery",
    ),
    "reserved alias": (
        job(register={"model": "m", "aliases": ["v3"]}),
        "MLflow reserves the aliases latest and v<number>: choose another",
    ),
    "code without command": (
        job(trainer={"code": {"configMapRef": {"name": "c"}}}),
        "args, code and dependencies can be set only when command is set, such as [torchrun, my_train.py]",
    ),
    "code from two places": (
        job(trainer=code(volume="code", git={"url": "https://host/owner/code"})),
        "set exactly one of configMapRef, volume and git",
    ),
    **{
        f"a repository at {url}": (job(trainer=code(git={"url": url})), sentence)
        for url, sentence in {
            "ssh://git@host/owner/code": "write the address as https://host/owner/repository, without ? and #: ssh, git and http",
            "git@host:owner/code.git": "write the address as https://host/owner/repository, without ? and #: ssh, git and http",
            "https://me:token@host/owner/code": "the address contains a user or a password: put them into a Secret",
            "https://host/owner/code?x=$(TOKEN)": "write the address as https://host/owner/repository, without ? and #",
        }.items()
    },
    "a range of commits": (
        job(trainer=code(git={"url": "https://host/owner/code", "revision": "a..b"})),
        "revision must be a branch, a tag, or a full commit hash",
    ),
    **{
        f"the dependency {text}": (job(trainer={"command": ["python"], "dependencies": [text]}), sentence)
        for text, sentence in {
            "--index-url=https://host": "options of pip are not supported here: set variables such as PIP_INDEX_URL",
            "a @ https://me:token@host/a.whl": "the address contains a user or a password: publish the package in an index",
            "https://host/a.whl": "write a requirement in pip's format, such as datasets>=3",
            "a>=1,$(TOKEN)": "write a requirement in pip's format",
            "a b": "write a requirement in pip's format",
        }.items()
    },
    "dependencies of the built-in loop": (
        job(trainer={"dependencies": ["datasets>=3"]}),
        "args, code and dependencies can be set only when command is set, such as [torchrun, my_train.py]",
    ),
    "a dependency twice": (
        job(trainer={"command": ["python"], "dependencies": ["trl", "trl"]}),
        'Duplicate value: "trl"',
    ),
    "a chat template of one's own that is not there": (
        job(model={"base": "org/base", "chatTemplate": {"type": "Jinja"}}),
        "jinja is required when type is Jinja, and forbidden otherwise",
    ),
    **{
        f"to resume from {what}": (
            job(checkpoint={"uri": "/c", "resumeFrom": place}, trainer={"command": command}),
            sentence,
        )
        for what, place, command, sentence in (
            (
                "a job without a name",
                {"type": "Job"},
                [],
                "set only the field that matches type: name for Job, uri for Uri",
            ),
            (
                "a place without one",
                {"type": "Uri"},
                [],
                "set only the field that matches type: name for Job, uri for Uri",
            ),
            (
                "both",
                {"type": "Uri", "uri": "/c/a", "name": "a"},
                [],
                "set only the field that matches type: name for Job, uri for Uri",
            ),
            (
                "a relative path",
                {"type": "Uri", "uri": "c/a"},
                [],
                "uri must be s3://bucket/folder, gs://bucket/folder, abfss://",
            ),
            (
                "a bucket",
                {"type": "Uri", "uri": "s3://bucket"},
                [],
                "uri must be s3://bucket/folder, gs://bucket/folder, abfss://",
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
                "checkpoint.resumeFrom must not be set when trainer.command is set",
            ),
            (
                "itself",
                {"type": "Job", "name": "tune"},
                [],
                "checkpoint.resumeFrom.name must not be this job, which "
                "resumes from its own checkpoints anyway",
            ),
        )
    },
    **{
        f"the name of {what}": (body, sentence)
        for what, body, sentence in (
            ("a Secret", job(tracking={"secretRef": {"name": " "}}), OBJECT),
            ("a Secret in capitals", of_pods("train", envFrom=[{"secretRef": {"name": "Hub"}}]), OBJECT),
            ("a ConfigMap", of_pods("train", envFrom=[{"configMapRef": {"name": "-a"}}]), OBJECT),
            ("a ConfigMap of code", job(trainer=code(configMapRef={"name": "a_b"})), OBJECT),
            (
                "a volume",
                job(trainer=code(volume="a.b")),
                "spec.trainer.code.volume in body should match",
            ),
            (
                "a queue",
                job(runPolicy={"queueName": "a b"}),
                "spec.runPolicy.queueName in body should match",
            ),
            ("a long queue", job(runPolicy={"queueName": "q" * 64}), "Too long: may not be "),
            ("a variable", of_pods("train", env=[{"name": "1ST", "value": "a"}]), VARIABLE),
            ("two variables", of_pods("train", env=[{"name": "A=B", "value": "a"}]), VARIABLE),
            ("a prefix", of_pods("train", envFrom=[{"prefix": "a b", "secretRef": {"name": "s"}}]), VARIABLE),
            ("an image", of_pods("train", image=" "), "spec.pods.train.image in body should match '^[^ ]+$'"),
        )
    },
    "a variable from two places": (
        of_pods("train", env=[{"name": "A", "value": "a", "valueFrom": {"fieldRef": {}}}]),
        "value and valueFrom must not both be set",
    ),
    **{
        f"{what} twice": (body, "Duplicate value")
        for what, body in (
            ("a variable", of_pods("train", env=[{"name": "A", "value": "a"}, {"name": "A", "value": "b"}])),
            ("a variable of the preparation", of_pods("prepare", env=[{"name": "A", "value": "a"}] * 2)),
            ("an alias", job(register={"model": "m", "aliases": ["a", "a"]})),
            ("a column", job(data=prepared(notNull=["a", "a"]))),
            ("a fatal exit code", job(runPolicy={"fatalExitCodes": [3, 3]})),
            ("an exit code to retry", job(runPolicy={"retryableExitCodes": [3, 3]})),
            ("a layer", job(method={"type": "LoRA", "lora": {"targetModules": ["q_proj", "q_proj"]}})),
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
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
    "models on a claim, on CPUs": job(
        model={"base": "org/base", "cache": {"claimName": "models"}}, distributed={"device": "CPU"}
    ),
    "what a script leaves in the folder of its code from Git": job(
        output={"uri": "s3://models/a", "from": "/workspace/outputs", "secretRef": {"name": "store"}},
        trainer=code(git={"url": "https://host/owner/code.git"}),
    ),
    "what a script leaves, in a workspace": job(
        output={"uri": "/Volumes/main/llm/a", "from": "/Volumes2/a"},
        trainer=SCRIPT,
        tracking=AT_DATABRICKS,
        register=None,
    ),
    "to resume from a job": job(checkpoint={"resumeFrom": {"type": "Job", "name": "another"}}),
    "to resume from a place": job(
        checkpoint={"uri": "/c", "resumeFrom": {"type": "Uri", "uri": "s3://bucket/c/a"}}
    ),
    "an evaluation of files": evaluated(
        {"metrics": ["Loss", "Accuracy"], "limit": 100, "generations": 0},
        data={"splits": {"type": "JSONLines", "train": "/x", "test": "/y"}},
    ),
    "a command without a test split": evaluated(
        {"command": ["judge"], "parameters": {"task": "a"}},
        data=prepared(splitRatios={"train": 0.9, "validation": 0.1, "test": 0}),
    ),
    "names of all kinds": job(
        trainer=code(configMapRef={"name": "my.code-1"}),
        pods={
            "all": {"serviceAccountName": "trainer.v1"},
            "train": {
                "image": "registry.example.org:5000/team/trainer@sha256:0123",
                "env": [{"name": "_A.b-1", "value": "a"}, {"name": ".B", "valueFrom": {"fieldRef": {}}}],
                "envFrom": [{"prefix": "S3_", "secretRef": {"name": "0.s3.login"}}],
            },
        },
        runPolicy={"queueName": "team-a.gpu"},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
