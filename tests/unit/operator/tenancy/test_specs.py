"""What jobs and promotions use without permission, and which rule would permit it."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.settings import Settings
from finetune_operator.tenancy.model import Tenancy, Tenant
from finetune_operator.tenancy.specs import count_needed_approvals, find_job_breaches, find_promotion_breaches
from fixtures.operator_in_memory.decisions import SETTINGS, SOURCE, SPLITS, ftj

Json = dict[str, Any]
MLFLOW = {"uri": "http://mlflow:5000/", "credentials": "Installation"}
OWN_MLFLOW = {"uri": "https://mlflow.team.example", "credentials": "Own"}
OWN_WORKSPACE = {"uri": "databricks", "credentials": "Own"}
ON_DATABRICKS: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
SECRET: Json = {"secretRef": {"name": "mine"}}
VOLUME = "/Volumes/main/llm/work"


def tenant(**rules: Any) -> Tenant:
    """The tenant of namespace team, which may use the MLflow server of the installation; with other rules."""
    document = {"tenants": [{"namespaces": ["team"], "tracking": [MLFLOW]} | rules]}
    return Tenancy.model_validate(document).tenants[0]


def on_spark(mode: str, **spark: Any) -> Json:
    return {"data": {**SOURCE, "prepare": {"output": "s3://lake/a", "spark": {"mode": mode, **spark}}}}


def on_databricks(compute: Json | None = None, **databricks: Any) -> Json:
    settings = {"volume": VOLUME, "compute": compute or {"type": "Serverless"}, **databricks}
    return on_spark("Databricks", databricks=settings)


def existing(cluster: str) -> Json:
    return {"type": "ExistingCluster", "existingCluster": {"clusterId": cluster}}


def new_cluster(**fields: Any) -> Json:
    fields = {"sparkVersion": "17.3.x-scala2.13", "nodeType": "i3.xlarge", **fields}
    return {"type": "NewCluster", "newCluster": fields}


DATABRICKS: Json = {"databricks": {"principal": "Own"}}
AS_INSTALLATION: Json = {"databricks": {"principal": "Installation"}}
TOKEN = ", because with spark.mode Kubernetes the pod has an API token,"
OWN_LOGIN = (
    "with the credentials of the installation, because spec.tracking.secretRef names no required Secret,"
)
JOBS: dict[str, tuple[Json, Json, list[tuple[str, str]]]] = {
    "the server of the installation": ({}, {}, []),
    "another server": (
        {"tracking": {"uri": "http://10.0.0.1", **SECRET}},
        {},
        [("spec.tracking.uri http://10.0.0.1", "tracking")],
    ),
    "an address with a user": (
        {"tracking": {"uri": "http://me@mlflow:5000"}},
        {},
        [("spec.tracking.uri http://mlflow:5000", "tracking")],
    ),
    "its own server in another spelling": (
        {"tracking": {"uri": "https://MLFLOW.team.example:443/", **SECRET}},
        {"tracking": [OWN_MLFLOW]},
        [],
    ),
    "its own server with the credentials of the installation": (
        {"tracking": {"uri": "https://mlflow.team.example"}},
        {"tracking": [OWN_MLFLOW]},
        [(f"spec.tracking.uri https://mlflow.team.example {OWN_LOGIN}", "tracking")],
    ),
    "a Secret that may be missing": (
        {
            "tracking": {
                "uri": "https://mlflow.team.example",
                "secretRef": {"name": "mine", "optional": True},
            }
        },
        {"tracking": [OWN_MLFLOW]},
        [(f"spec.tracking.uri https://mlflow.team.example {OWN_LOGIN}", "tracking")],
    ),
    "another registry": (
        {"tracking": {"uri": "http://mlflow:5000", "registryUri": "http://10.0.0.1"}},
        {},
        [("spec.tracking.registryUri http://10.0.0.1", "tracking")],
    ),
    "its own workspace": ({"tracking": ON_DATABRICKS | SECRET}, {"tracking": [OWN_WORKSPACE]}, []),
    "the workspace of the installation": (
        {"tracking": ON_DATABRICKS},
        {"tracking": [OWN_WORKSPACE]},
        [
            (f"spec.tracking.registryUri databricks-uc {OWN_LOGIN}", "tracking"),
            (f"spec.tracking.uri databricks {OWN_LOGIN}", "tracking"),
        ],
    ),
    "its own model and alias": (
        {"register": {"model": "team.llm", "aliases": ["candidate"]}},
        {"models": ["team.*"], "aliases": ["candidate"]},
        [],
    ),
    "the model and the alias of others": (
        {"register": {"model": "prod.llm", "aliases": ["candidate", "champion"]}},
        {"models": ["team.*"], "aliases": ["candidate"]},
        [("spec.register.model prod.llm", "models"), ("spec.register.aliases champion", "aliases")],
    ),
    "an alias that needs approvals": (
        {"register": {"model": "team.llm", "aliases": ["candidate", "champion"]}},
        {"models": ["*"], "aliases": ["*"], "approvals": [{"alias": "champ*", "models": ["team.*"]}]},
        [("spec.register.aliases champion, which only a ModelPromotion may move,", "approvals")],
    ),
    "an alias that needs approvals in another case": (
        {"register": {"model": "team.llm", "aliases": ["Champion"]}},
        {"models": ["*"], "aliases": ["*"], "approvals": [{"alias": "champion"}]},
        [("spec.register.aliases Champion, which only a ModelPromotion may move,", "approvals")],
    ),
    "an alias of another model that needs approvals": (
        {"register": {"model": "team.llm", "aliases": ["champion"]}},
        {"models": ["*"], "aliases": ["*"], "approvals": [{"alias": "champion", "models": ["prod.*"]}]},
        [],
    ),
    "the alias of a job that names none": (
        {"register": {"model": "team.llm"}},
        {"models": ["team.*"]},
        [("spec.register.aliases candidate", "aliases")],
    ),
    "a model named like the job": (
        {"register": {}},
        {"aliases": ["*"]},
        [("spec.register.model tune", "models")],
    ),
    "a model in another case": (
        {"register": {"model": "TEAM.llm", "aliases": []}},
        {"models": ["team.*"]},
        [("spec.register.model TEAM.llm", "models")],
    ),
    "a model of Unity Catalog in another case": (
        {"register": {"model": "TEAM.a.llm", "aliases": ["Champion"]}, "tracking": ON_DATABRICKS | SECRET},
        {"models": ["team.*"], "aliases": ["champion"], "tracking": [OWN_WORKSPACE]},
        [],
    ),
    "a model that only a regular expression would match": (
        {"register": {"model": "teamxllm", "aliases": []}},
        {"models": ["team.llm"]},
        [("spec.register.model teamxllm", "models")],
    ),
    "a pattern of Unity Catalog in another case": (
        {"register": {"model": "team.a.llm", "aliases": []}, "tracking": ON_DATABRICKS | SECRET},
        {"models": ["Team.*"], "tracking": [OWN_WORKSPACE]},
        [],
    ),
    "a secret in a list": (
        {"trainer": {"command": ["train"], "args": ["{{secrets/admin/key}}"]}},
        {},
        [("{{secrets/admin}}", "databricks.secretScopes")],
    ),
    "a repository": (
        {"trainer": {"command": ["train"], "code": {"git": {"url": "https://git.example/evil/x"}}}},
        {"repositories": ["https://git.example/team/*"]},
        [("spec.trainer.code.git.url https://git.example/evil/x", "repositories")],
    ),
    "its repository": (
        {"trainer": {"command": ["train"], "code": {"git": {"url": "https://git.example/team/x"}}}},
        {"repositories": ["https://git.example/team/*"]},
        [],
    ),
    "its experiment": (
        {"tracking": {"experiment": "team-tuning"}},
        {"experiments": ["team-*"]},
        [],
    ),
    "the experiment of others": (
        {"tracking": {"experiment": "/Users/boss/runs"}},
        {"experiments": ["team-*"]},
        [("spec.tracking.experiment /Users/boss/runs", "experiments")],
    ),
    "a repository above its folder": (
        {"trainer": {"command": ["train"], "code": {"git": {"url": "https://git.example/team/%2E%2e/evil"}}}},
        {"repositories": ["https://git.example/team/*"]},
        [("spec.trainer.code.git.url https://git.example/team/%2E%2e/evil", "repositories")],
    ),
    "accounts": (
        {
            "pods": {
                "all": {"serviceAccountName": "mine"},
                "train": {"template": {"spec": {"serviceAccountName": "admin"}}},
                "prepare": {"template": {"spec": {"serviceAccount": "admin"}}},
            }
        },
        {"serviceAccounts": ["mine"]},
        [
            ("spec.pods.prepare.template.spec.serviceAccount admin", "serviceAccounts"),
            ("spec.pods.train.template.spec.serviceAccountName admin", "serviceAccounts"),
        ],
    ),
    "a driver with a token and code of the author": (
        on_spark("Kubernetes")
        | {
            "pods": {
                "all": {
                    "env": [{"name": "LD_PRELOAD", "value": "x"}, {"name": "AWS_REGION", "value": "x"}],
                    "template": {"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}]}},
                },
                "prepare": {
                    "image": "evil",
                    "env": [{"name": "PYTHONPATH", "value": "/data"}],
                    "envFrom": [{"configMapRef": {"name": "java-options"}}],
                    "template": {
                        "spec": {
                            "containers": [
                                {
                                    "name": "main",
                                    "env": [{"name": "A", "value": "b"}],
                                    "envFrom": [{"secretRef": {"name": "a"}}],
                                    "volumeMounts": [{"name": "a", "mountPath": "/opt"}],
                                }
                            ]
                        }
                    },
                },
            }
        },
        {},
        [
            (f"spec.pods.prepare.image evil{TOKEN}", "pods"),
            (f"spec.pods.all.env LD_PRELOAD{TOKEN}", "pods"),
            (f"spec.pods.all.template with volumes{TOKEN}", "pods"),
            (f"spec.pods.prepare.env PYTHONPATH{TOKEN}", "pods"),
            (f"spec.pods.prepare.envFrom{TOKEN}", "pods"),
            (f"spec.pods.prepare.template with env{TOKEN}", "pods"),
            (f"spec.pods.prepare.template with envFrom{TOKEN}", "pods"),
            (f"spec.pods.prepare.template with volumeMounts{TOKEN}", "pods"),
            ("spec.pods.prepare.template.spec.containers volumeMounts of volume a", "pods"),
        ],
    ),
    "an image for a driver without a token": (
        on_spark("Local") | {"pods": {"prepare": {"image": "mine"}}},
        {},
        [],
    ),
    "an image for a driver, where anything is permitted": (
        on_spark("Kubernetes") | {"pods": {"prepare": {"image": "mine"}}},
        {"pods": "Any"},
        [],
    ),
    "code of a repository of models": (
        {
            "model": {"base": "a/b", "trustRemoteCode": True},
            "objective": {
                "type": "Distillation",
                "distillation": {"teacher": "t", "teacherTrustRemoteCode": True},
            },
        },
        {},
        [
            ("spec.model.trustRemoteCode", "trustRemoteCode"),
            ("spec.objective.distillation.teacherTrustRemoteCode", "trustRemoteCode"),
        ],
    ),
    "code of a repository of models, permitted": (
        {"model": {"base": "a/b", "trustRemoteCode": True}},
        {"trustRemoteCode": True},
        [],
    ),
    "as many nodes as permitted": ({"distributed": {"nodes": 16}}, {"maxNodes": 16}, []),
    "too many nodes": (
        {"distributed": {"nodes": 17}},
        {"maxNodes": 16},
        [("spec.distributed.nodes 17", "maxNodes")],
    ),
    "no workspace is permitted": (
        on_databricks(**SECRET),
        {},
        [("spec.data.prepare.spark.databricks", "databricks")],
    ),
    "a run with its own login": (on_databricks(**SECRET), DATABRICKS, []),
    "a run with the login of the tracking server": (
        on_databricks() | {"tracking": ON_DATABRICKS | SECRET},
        DATABRICKS | {"tracking": [OWN_WORKSPACE]},
        [],
    ),
    "a run as the installation": (
        on_databricks(),
        DATABRICKS,
        [
            (
                "spec.data.prepare.spark.databricks without a required Secret in secretRef",
                "databricks.principal",
            )
        ],
    ),
    "a run as the installation, permitted": (on_databricks(), AS_INSTALLATION, []),
    "a cluster": (
        on_databricks(existing("0101-a"), **SECRET),
        DATABRICKS,
        [("spec.data.prepare.spark.databricks.compute.existingCluster 0101-a", "databricks.clusters")],
    ),
    "its cluster": (
        on_databricks(existing("0101-a"), **SECRET),
        {"databricks": {"clusters": ["0101-*"]}},
        [],
    ),
    "a new cluster of any size": (
        on_databricks(new_cluster(), **SECRET),
        {"databricks": {"clusters": ["0101-*"]}},
        [
            (
                "spec.data.prepare.spark.databricks.compute.newCluster without an instance pool or a policy",
                "databricks.clusters",
            )
        ],
    ),
    "a new cluster by a policy": (
        on_databricks(new_cluster(policyId="0101-p"), **SECRET),
        {"databricks": {"clusters": ["0101-*"]}},
        [],
    ),
    "a secret of the workspace": (
        on_databricks(
            new_cluster(
                policyId="p",
                env={"HF_TOKEN": "{{ secrets/admin/hub }}", "OTHER": "a{{secrets/team/hub}}"},
            ),
            **SECRET,
        ),
        {"databricks": {"clusters": ["p"], "secretScopes": ["team"]}},
        [("{{secrets/admin}}", "databricks.secretScopes")],
    ),
}


UPWARDS = (
    "https://git.example/team/../evil/x",
    "https://git.example/team/%2e%2e/evil/x",
    "https://git.example/team/..%2fevil/x",
    "https://git.example/team/%252e%252e%252fevil/x",
    "https://git.example/team/..\\evil/x",
    "https://git.example/team/..;/evil/x",
    "https://git.example/team/./x",
)


@pytest.mark.parametrize("url", UPWARDS)
def test_a_repository_above_the_pattern_is_refused(url: str) -> None:
    trainer = {"command": ["train"], "code": {"git": {"url": url}}}
    job = ftj(trainer=trainer)
    assert job.written
    assert job.spec
    own = tenant(repositories=["https://git.example/team/*"])
    breaches = find_job_breaches(job.written, job.spec, own, SETTINGS)
    assert [breach.rule for breach in breaches] == ["repositories"]


@pytest.mark.parametrize("case", JOBS.values(), ids=JOBS)
def test_what_a_job_uses_without_permission(case: tuple[Json, Json, list[tuple[str, str]]]) -> None:
    parts, rules, expected = case
    job = ftj(**parts)
    assert job.written
    assert job.spec
    breaches = find_job_breaches(job.written, job.spec, tenant(**rules), SETTINGS)
    assert [(breach.what, breach.rule) for breach in breaches] == expected


def test_what_the_chart_adds_is_permitted() -> None:
    """The account and the template of the chart's defaults are the choice of the platform team."""
    from finetune_operator.defaults import Defaults

    pods = {"all": {"serviceAccountName": "chart", "template": {"spec": {"hostNetwork": True}}}}
    job = ftj(defaults=Defaults.model_validate({"pods": pods}))
    assert job.written
    assert job.spec
    assert [*find_job_breaches(job.written, job.spec, tenant(), SETTINGS)] == []


def test_a_job_without_a_server_uses_none() -> None:
    job = ftj(data=SPLITS)
    assert job.written
    assert job.spec
    assert [*find_job_breaches(job.written, job.spec, tenant(tracking=[]), Settings())] == []


PROMOTION: Json = {"model": "team.llm", "alias": "champion", "source": {"type": "Version", "version": 1}}
PERMITTED: Json = {"models": ["team.*"], "aliases": ["champion"]}
SERVED: Json = {
    "model": "team.a.llm",
    "tracking": ON_DATABRICKS | SECRET,
    "serving": {"type": "Databricks", "endpoint": "team-llm", "databricks": SECRET},
}
MAY_SERVE: Json = PERMITTED | {"tracking": [OWN_WORKSPACE], "endpoints": ["team-*"], **DATABRICKS}


def with_databricks(**fields: Any) -> Json:
    return SERVED | {"serving": {**SERVED["serving"], "databricks": fields}}


def watched(url: str) -> Json:
    prometheus = {"url": url, "query": "errors", "secretRef": {"name": "of-somebody"}}
    return {
        "onRegression": {
            "action": "Rollback",
            "prometheus": prometheus,
            "max": 1,
            "forSeconds": 60,
            "watchSeconds": 600,
        }
    }


def copied(**registry: Any) -> Json:
    """A promotion of a copy."""
    source = {"uri": "https://dev.example", "model": "team.dev", "version": 3} | registry
    return {"source": {"type": "Registry", "registry": source}}


def with_gate(template: Json) -> Json:
    job = {"image": "judge", "template": template}
    return {"gates": [{"name": "judge", "type": "Job", "job": job}]}


PROMOTIONS: dict[str, tuple[Json, Json, list[tuple[str, str]]]] = {
    "its own": ({}, PERMITTED, []),
    "the alias of others": ({}, {"models": ["team.*"]}, [("spec.alias champion", "aliases")]),
    "the model of others": ({"model": "prod.llm"}, PERMITTED, [("spec.model prod.llm", "models")]),
    "another registry": (
        {"tracking": {"registryUri": "http://10.0.0.1", **SECRET}},
        PERMITTED,
        [("spec.tracking.registryUri http://10.0.0.1", "tracking")],
    ),
    "its endpoint": (SERVED, MAY_SERVE, []),
    "the endpoint of others": (
        SERVED,
        MAY_SERVE | {"endpoints": ["other-*"]},
        [("spec.serving.endpoint team-llm", "endpoints")],
    ),
    "an endpoint that an alias without approvals must not reach": (
        SERVED,
        MAY_SERVE | {"approvals": [{"alias": "prod*", "endpoints": ["team-*"]}]},
        [
            (
                "spec.serving.endpoint team-llm, which only a promotion of an alias that needs approvals may name,",
                "approvals",
            )
        ],
    ),
    "an endpoint of a model that needs no approvals": (
        SERVED | {"model": "team.other"},
        MAY_SERVE | {"approvals": [{"alias": "champion", "models": ["team.llm"], "endpoints": ["team-llm"]}]},
        [
            (
                "spec.serving.endpoint team-llm, which only a promotion of an alias that needs approvals may name,",
                "approvals",
            )
        ],
    ),
    "the endpoint of an alias that needs approvals": (
        SERVED,
        MAY_SERVE
        | {
            "approvals": [
                {"alias": "champion", "endpoints": ["Team-*"]},
                {"alias": "prod", "endpoints": ["*"]},
            ]
        },
        [],
    ),
    "another endpoint than that of an alias that needs approvals": (
        SERVED,
        MAY_SERVE | {"approvals": [{"alias": "prod*", "endpoints": ["prod-*"]}]},
        [],
    ),
    "as the installation": (
        with_databricks(),
        MAY_SERVE,
        [("spec.serving.databricks without a required Secret in secretRef", "databricks.principal")],
    ),
    "a secret of the workspace": (
        with_databricks(environment={"KEY": "{{secrets/admin/key}}"}, **SECRET),
        MAY_SERVE,
        [("{{secrets/admin}}", "databricks.secretScopes")],
    ),
    "the table of others": (
        with_databricks(inferenceTable={"catalog": "prod", "schema": "logs"}, **SECRET),
        MAY_SERVE,
        [("spec.serving.databricks.inferenceTable prod.logs", "models")],
    ),
    "its Prometheus": (
        watched("https://PROMETHEUS.team.example/"),
        PERMITTED | {"prometheus": ["https://prometheus.team.example"]},
        [],
    ),
    "another Prometheus": (
        watched("http://10.0.0.1"),
        PERMITTED | {"prometheus": ["https://prometheus.team.example"]},
        [("spec.onRegression.prometheus.url http://10.0.0.1", "prometheus")],
    ),
    "a copy from a permitted registry": (
        copied(secretRef={"name": "dev"}),
        PERMITTED | {"tracking": [MLFLOW, {"uri": "https://dev.example", "credentials": "Own"}]},
        [],
    ),
    "a copy from another registry": (
        copied(secretRef={"name": "dev"}),
        PERMITTED,
        [("spec.source.registry.uri https://dev.example", "tracking")],
    ),
    "a copy without a login, of a model of others, on the node": (
        copied(model="others", template={"spec": {"hostPID": True}}),
        PERMITTED | {"tracking": [MLFLOW, {"uri": "https://dev.example", "credentials": "Own"}]},
        [
            (
                "spec.source.registry.uri https://dev.example with the credentials of the installation, because "
                "spec.source.registry.secretRef names no required Secret,",
                "tracking",
            ),
            ("spec.source.registry.model others", "models"),
            ("spec.source.registry.template.spec.hostPID", "pods"),
        ],
    ),
    "a gate with GPUs": (
        with_gate(
            {"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}
        ),
        PERMITTED | {"maxGpus": 8},
        [
            (
                "spec.gates judge job.template with GPUs, which maxGpus does not count,",
                "maxGpus",
            )
        ],
    ),
    "a gate on the node": (
        with_gate({"spec": {"hostPID": True, "nodeSelector": {"pool": "cpu"}}}),
        PERMITTED,
        [("spec.gates judge job.template.spec.hostPID", "pods")],
    ),
}


@pytest.mark.parametrize("case", PROMOTIONS.values(), ids=PROMOTIONS)
def test_what_a_promotion_uses_without_permission(case: tuple[Json, Json, list[tuple[str, str]]]) -> None:
    parts, rules, expected = case
    spec = ModelPromotionSpec.model_validate(PROMOTION | parts)
    breaches = find_promotion_breaches(spec, tenant(**rules), SETTINGS)
    assert [(breach.what, breach.rule) for breach in breaches] == expected


RULES: list[Json] = [
    {"alias": "champion", "count": 2},
    {"alias": "champ*", "models": ["prod.*", "main.*"], "count": 3, "groups": ["leads"]},
    {"alias": "shadow"},
]
NEEDED = {
    "a rule for all models": ("team.llm", "champion", {}, 2),
    "the largest of two rules": ("prod.llm", "champion", {}, 3),
    "the default of a rule": ("team.llm", "shadow", {}, 1),
    "no rule": ("team.llm", "candidate", {}, 0),
    "another case": ("Prod.llm", "Champion", {}, 3),
    "another case in Unity Catalog": ("MAIN.llm.a", "Champion", {"tracking": ON_DATABRICKS}, 3),
}


@pytest.mark.parametrize(("model", "alias", "more", "count"), NEEDED.values(), ids=NEEDED.keys())
def test_how_many_approvals_an_alias_needs(model: str, alias: str, more: Json, count: int) -> None:
    source = {"type": "Version", "version": 1}
    spec = ModelPromotionSpec.model_validate({"model": model, "alias": alias, "source": source, **more})
    assert count_needed_approvals(spec, tenant(approvals=RULES)) == count
