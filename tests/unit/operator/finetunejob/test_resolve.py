"""What a job leaves out: from its name, from the installation, and for the life of the job as it was at first."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.preparation import settings_digest
from finetune_crds.recipe import JobReference, Recipe
from finetune_crds.status import Resolved
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.resolve import gpu_limit, resolve
from finetune_operator.finetunejob.resolve import resolved as settled

Json = dict[str, Any]

SHORT: Json = {
    "model": {"base": "Qwen/Qwen2.5-0.5B-Instruct"},
    "data": {"source": {"type": "Parquet", "path": "s3://corpora/chats"}},
    "method": {"type": "LoRA"},
    "distributed": {"nodes": 2, "gpusPerNode": 8},
    "register": {},
}
INSTALLED: Json = {
    "storage": "s3://bucket/root/",
    "pods": {
        "all": {
            "env": [{"name": "AWS_REGION", "value": "eu"}],
            "envFrom": [{"secretRef": {"name": "s3"}}],
            "serviceAccountName": "trainer",
        },
        "train": {"template": {"spec": {"tolerations": [{"key": "gpu"}]}}},
    },
    "imagePullSecrets": [{"name": "registry"}],
    "queueName": "training",
    "modelCache": {"claimName": "models"},
    "checkpoint": {"everySteps": 50},
    "catalog": {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}},
}


def settled_of(spec: FineTuneJobSpec, defaults: Defaults) -> Resolved:
    """What stays for the life of the job team/chat."""
    return settled(spec, namespace="team", name="chat", defaults=defaults)


def spec_of(spec: Json, installed: Json = INSTALLED, before: Json | None = None) -> FineTuneJobSpec:
    """A spec of the job team/chat, resolved; `before` is the installation when the job was accepted."""

    def made(defaults: Json, fields: Any = None) -> FineTuneJobSpec:
        return resolve(
            FineTuneJobSpec.model_validate(spec),
            namespace="team",
            name="chat",
            earlier=fields,
            defaults=Defaults.model_validate(defaults),
        )

    resolved_before = (
        settled_of(made(before), Defaults.model_validate(before)) if before is not None else None
    )
    return made(installed, resolved_before)


def test_the_shortest_job_has_everything_of_its_installation() -> None:
    job_spec = spec_of(SHORT | {"evaluation": {}})
    assert job_spec.data
    assert job_spec.model
    assert settled_of(job_spec, Defaults.model_validate(INSTALLED)).to_json() == {
        "output": f"s3://bucket/root/splits/team/{settings_digest(job_spec.data, job_spec.model, job_spec.objective)}",
        "checkpoint": {"uri": "s3://bucket/root/checkpoints", "everySteps": 50, "keep": 2, "mode": "Async"},
        "model": "chat",
        "queueName": "training",
        "learningRate": 2e-4,
    }
    env = {
        "env": [{"name": "AWS_REGION", "value": "eu"}],
        "envFrom": [{"secretRef": {"name": "s3", "optional": False}}],
    }
    shared = {
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "trainer",
        "containers": [{"name": "main", **env}],
    }
    assert job_spec.pods.prepare.template == job_spec.pods.evaluate.template == {"spec": shared}
    resources = {"limits": {"nvidia.com/gpu": "8"}}
    assert job_spec.pods.train.template == {
        "spec": {
            **shared,
            "tolerations": [{"key": "gpu"}],
            "containers": [{"name": "main", **env, "resources": resources}],
        }
    }
    assert job_spec.model_cache
    assert (job_spec.distributed.processes_per_node, job_spec.model_cache.claim_name) == (8, "models")


def test_the_table_is_of_all_jobs_with_the_same_preparation() -> None:
    never = {"data": {**SHORT["data"], "prepare": {"reuse": "Never"}}}
    other_output = {"data": {**SHORT["data"], "prepare": {"maxTokens": 100}}}
    specs = (SHORT, SHORT | {"training": {"seed": 7}}, SHORT | other_output, SHORT | never)
    settled_as = [
        settled(
            FineTuneJobSpec.model_validate(spec),
            namespace="team",
            name=name,
            defaults=Defaults.model_validate(INSTALLED),
        ).output
        for name, spec in zip("abcd", specs, strict=True)
    ]
    assert settled_as[0] == settled_as[1]
    assert len({*settled_as}) == 3
    assert settled_as[3] == "s3://bucket/root/splits/team/d"


OWN: dict[str, tuple[Json, Json]] = {
    "an output": (
        {"data": {**SHORT["data"], "prepare": {"output": "/mine"}}},
        {"output": "/mine"},
    ),
    "a model": ({"register": {"model": "support"}}, {"model": "support"}),
    "a table, in the catalog of the installation": (
        {"data": {"source": {"type": "Delta", "table": "support.chats"}}},
        {"catalog": INSTALLED["catalog"]},
    ),
    "a table, in its own catalog": (
        {
            "data": {
                "source": {"type": "Delta", "table": "a.b.c"},
                "prepare": {"catalog": {"type": "Databricks"}},
            }
        },
        {"catalog": {"type": "Databricks"}},
    ),
    "a folder of checkpoints": (
        {"checkpoint": {"uri": "/mine"}},
        {"checkpoint": {"uri": "/mine", "everySteps": 50, "keep": 2, "mode": "Async"}},
    ),
    "how often": (
        {"checkpoint": {"everySteps": 7}},
        {
            "checkpoint": {
                "uri": "s3://bucket/root/checkpoints",
                "everySteps": 7,
                "keep": 2,
                "mode": "Async",
            }
        },
    ),
    "a learning rate": ({"training": {"learningRate": 1e-3}}, {"learningRate": 1e-3}),
    "all weights": ({"method": {"type": "Full"}}, {"learningRate": 2e-5}),
    "a command, which has checkpoints and a learning rate of its own": (
        {"trainer": {"command": ["torchrun", "mine.py"]}},
        {"checkpoint": None, "learningRate": None},
    ),
    "nothing to register": ({"register": None}, {"model": None}),
}


@pytest.mark.parametrize(("spec", "expected"), OWN.values(), ids=OWN)
def test_the_words_of_a_job_come_before_those_of_its_installation(spec: Json, expected: Json) -> None:
    job_spec = settled_of(spec_of(SHORT | spec), Defaults.model_validate(INSTALLED)).to_json()
    assert {name: job_spec.get(name) for name in expected} == expected


def test_without_an_installation_a_job_has_what_it_says() -> None:
    job_spec = spec_of(SHORT, {})
    assert settled_of(job_spec, Defaults()).to_json() == {"model": "chat", "learningRate": 2e-4}
    assert (job_spec.checkpoint, job_spec.model_cache) == (None, None)


def value(text: str) -> Json:
    """What pods get that set a variable, an account, a label and a toleration to a text."""
    template = {"metadata": {"labels": {"of": text}}, "spec": {"tolerations": [{"key": text}]}}
    return {"env": [{"name": "OF", "value": text}], "serviceAccountName": text, "template": template}


# Where pods are described, from the lowest to the highest, and what the pods of training get then.
LAYERS = ("chart", "role-of-chart", "job", "role-of-job")


@pytest.mark.parametrize("highest", LAYERS)
def test_later_layers_of_pods_win(highest: str) -> None:
    chart: Json = {"all": value("chart")}
    job: Json = {}
    if highest != "chart":
        chart |= {"train": value("role-of-chart"), "prepare": value("another-role")}
    if highest in ("job", "role-of-job"):
        job |= {"all": value("job")}
    if highest == "role-of-job":
        job |= {"train": value(highest), "prepare": value("another-role")}
    template = spec_of(SHORT | {"pods": job}, {"pods": chart}).pods.train.template
    assert template
    pod = template["spec"]
    assert template["metadata"]["labels"] == {"of": highest}
    assert (pod["tolerations"], pod["serviceAccountName"]) == ([{"key": highest}], highest)
    assert pod["containers"][0]["env"] == [{"name": "OF", "value": highest}]


def test_a_variable_of_a_role_wins_over_the_template_of_all_pods() -> None:
    of_all = {"spec": {"containers": [{"name": "main", "env": [{"name": "OF", "value": "all"}]}]}}
    pods = {"all": {"template": of_all}, "train": {"env": [{"name": "OF", "value": "train"}]}}
    template = spec_of(SHORT | {"pods": pods}, {}).pods.train.template
    assert template
    assert template["spec"]["containers"][0]["env"] == [{"name": "OF", "value": "train"}]


def test_sources_of_variables_follow_each_other() -> None:
    def source(name: str) -> Json:
        return {"envFrom": [{"secretRef": {"name": name}}]}

    chart = {"pods": {"all": source("a"), "train": source("b")}}
    job = {"pods": {"all": source("c"), "train": source("d")}}
    template = spec_of(SHORT | job, chart).pods.train.template
    assert template
    found = [item["secretRef"]["name"] for item in template["spec"]["containers"][0]["envFrom"]]
    assert found == ["a", "b", "c", "d"]


IMAGES: dict[str, tuple[Json, Json, str | None]] = {
    "of nobody": ({}, {}, None),
    "of the chart": ({}, {"train": {"image": "chart:1"}}, "chart:1"),
    "of the job": ({"train": {"image": "job:1"}}, {"train": {"image": "chart:1"}}, "job:1"),
    "of another role": ({"evaluate": {"image": "job:1"}}, {}, None),
}


@pytest.mark.parametrize(("job", "chart", "image"), IMAGES.values(), ids=IMAGES)
def test_the_image_of_a_role(job: Json, chart: Json, image: str | None) -> None:
    assert spec_of(SHORT | {"pods": job}, {"pods": chart}).pods.train.image == image


def test_a_running_job_keeps_its_folders_and_takes_new_credentials() -> None:
    later = {**INSTALLED, "storage": "s3://other", "queueName": "other", "pods": {}}
    job_spec = spec_of(SHORT, later, before=INSTALLED)
    assert settled_of(job_spec, Defaults.model_validate(INSTALLED)) == settled_of(
        spec_of(SHORT), Defaults.model_validate(INSTALLED)
    )
    assert job_spec.pods.prepare.template == {"spec": {"imagePullSecrets": [{"name": "registry"}]}}


def test_a_pod_template_is_over_the_gpus_and_these_over_the_installations() -> None:
    limits = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}
    gpu = {"nodes": 1, "gpusPerNode": 8, "gpu": {"resourceName": "nvidia.com/mig-1g.10gb", "product": "A100"}}
    pods = {"train": {"template": {"spec": limits}}}
    template = spec_of(SHORT | {"distributed": gpu, "pods": pods}).pods.train.template
    assert template
    spec = template["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert spec["containers"][0]["resources"]["limits"] == {
        "nvidia.com/mig-1g.10gb": "8",
        "nvidia.com/gpu": "4",
    }


QUEUES: dict[str, tuple[Json, Json, str | None]] = {
    "of the installation": ({}, INSTALLED, "training"),
    "of the job": ({"queueName": "urgent"}, INSTALLED, "urgent"),
    "of the job alone": ({"queueName": "urgent"}, {}, "urgent"),
    "of nobody": ({}, {}, None),
    "none, whatever the installation has": ({"queueName": ""}, INSTALLED, ""),
}


@pytest.mark.parametrize(("policy", "installed", "queue"), QUEUES.values(), ids=QUEUES)
def test_a_job_waits_in_its_queue_or_in_that_of_its_installation(
    policy: Json, installed: Json, queue: str | None
) -> None:
    assert spec_of(SHORT | {"runPolicy": policy}, installed).run_policy.queue_name == queue


def test_a_job_whose_queue_is_removed_waits_in_none() -> None:
    accepted = settled_of(spec_of(SHORT | {"runPolicy": {"queueName": "typo"}}, {}), Defaults())
    later = resolve(
        FineTuneJobSpec.model_validate(SHORT),
        namespace="team",
        name="chat",
        earlier=accepted,
        defaults=Defaults(),
    )
    assert later.run_policy.queue_name is None


LIMITS: dict[str, tuple[Any, int | None]] = {
    "text": ("4", 4),
    "a number": (4, 4),
    "none": (None, None),
    "no number": ("many", None),
}


@pytest.mark.parametrize(("limit", "found"), LIMITS.values(), ids=LIMITS)
def test_the_limit_of_gpus_in_a_template(limit: Any, found: int | None) -> None:
    containers = [{"name": "other"}, {"name": "main", "resources": {"limits": {"nvidia.com/gpu": limit}}}]
    assert gpu_limit({"spec": {"containers": containers}}, "nvidia.com/gpu") == found
    assert gpu_limit({"spec": {"containers": "x"}}, "nvidia.com/gpu") is None


WRONG: dict[str, tuple[Json, str]] = {
    "an account": ({"pods": {"all": {"serviceAccountName": " "}}}, "' ' is not a valid object name"),
    "a claim": ({"modelCache": {"claimName": "A B"}}, "'A B' is not a valid object name"),
    "a variable": (
        {"pods": {"train": {"env": [{"name": "WORLD SIZE"}]}}},
        "'WORLD SIZE' is not a valid variable name",
    ),
    "a variable of ours": (
        {"pods": {"evaluate": {"env": [{"name": "WORLD_SIZE"}]}}},
        "pods.evaluate sets WORLD_SIZE, which the operator sets: remove the variable",
    ),
    "devices of all pods": (
        {
            "pods": {
                "all": {
                    "template": {
                        "spec": {"containers": [{"name": "main", "resources": {"limits": {"a.com/gpu": 1}}}]}
                    }
                }
            }
        },
        "pods.all.template requests a.com/gpu for all pods: remove the request; jobs request GPUs with spec.distributed.gpusPerNode",
    ),
    "a queue": ({"queueName": "Team"}, "'Team' is not a valid queue name"),
    "a queue without a name": ({"queueName": ""}, "'' is not a valid queue name"),
}


@pytest.mark.parametrize(("defaults", "message"), WRONG.values(), ids=WRONG)
def test_an_installation_cannot_name_what_cannot_be(defaults: Json, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        Defaults.model_validate(defaults)


WORK: Json = {"volume": "/Volumes/a/b/c", "compute": {"type": "Serverless"}, "secretRef": {"name": "login"}}
BY_NAME: dict[str, tuple[Json, Json]] = {
    "a folder": ({"type": "Delta", "path": "s3://corpora/chats"}, {}),
    "a table of the installation's catalog": ({"type": "Delta", "table": "support.chats"}, {}),
    "a SparkApplication": (
        {"type": "Delta", "table": "support.chats"},
        {"spark": {"mode": "SparkApplication"}},
    ),
    "a Databricks run": (
        {"type": "Delta", "table": "main.support.chats"},
        {"spark": {"mode": "Databricks", "databricks": WORK}},
    ),
    "a catalog with a token": (
        {"type": "Delta", "table": "main.support.chats"},
        {
            "catalog": {
                "type": "UnityCatalog",
                "unityCatalog": {"uri": "http://uc:8080", "secretRef": {"name": "uc"}},
            }
        },
    ),
}


@pytest.mark.parametrize(("source", "prepare"), BY_NAME.values(), ids=BY_NAME)
def test_the_folder_is_named_by_the_digest_that_the_prep_pod_computes(source: Json, prepare: Json) -> None:
    spec = spec_of(SHORT | {"data": {"source": source, "prepare": prepare}})
    reference = JobReference(name="chat", namespace="team", uid="uid")
    read = Recipe.model_validate(yaml.safe_load(Recipe.of(reference, spec).to_yaml()))
    assert read.data.prepare
    digest = settings_digest(read.data, read.model, read.objective)
    assert read.data.prepare.output == f"s3://bucket/root/splits/team/{digest}"
