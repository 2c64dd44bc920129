"""What a job leaves out: from its name, from the installation, and for the life of the job as it was at first."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.resolve import resolve, resolved

Json = dict[str, Any]

SHORT: Json = {
    "model": {"base": "Qwen/Qwen3-0.6B"},
    "data": {"source": {"type": "Parquet", "path": "s3://corpora/chats"}},
    "method": {"type": "LoRA"},
    "distributed": {"nodes": 2, "gpusPerNode": 8},
    "register": {},
}
INSTALLED: Json = {
    "storage": "s3://bucket/root/",
    "env": [{"name": "AWS_REGION", "value": "eu"}],
    "envFrom": [{"secretRef": {"name": "s3"}}],
    "imagePullSecrets": [{"name": "registry"}],
    "podTemplate": {"spec": {"tolerations": [{"key": "gpu"}]}},
    "queueName": "training",
    "serviceAccountName": "trainer",
    "modelCache": {"claimName": "models"},
    "checkpoint": {"everySteps": 50},
}


def spec_of(spec: Json, installed: Json = INSTALLED, before: Json | None = None) -> FineTuneJobSpec:
    """A spec of the job team/chat, resolved; `before` is the installation when the job was accepted."""

    def made(defaults: Json, known: Any = None) -> FineTuneJobSpec:
        return resolve(
            FineTuneJobSpec.model_validate(spec),
            namespace="team",
            name="chat",
            known=known,
            defaults=Defaults.model_validate(defaults),
        )

    return made(installed, resolved(made(before)) if before is not None else None)


def test_the_shortest_job_has_everything_of_its_installation() -> None:
    found = spec_of(SHORT)
    assert resolved(found).to_json() == {
        "output": "s3://bucket/root/splits/team/chat",
        "checkpoint": {"uri": "s3://bucket/root/checkpoints", "everySteps": 50, "keep": 2, "mode": "Async"},
        "model": "chat",
        "queueName": "training",
    }
    assert found.pod_template == {
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "serviceAccountName": "trainer",
            "tolerations": [{"key": "gpu"}],
            "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
        }
    }
    prepare = found.data.prepare
    assert prepare
    assert prepare.pod_template == {
        "spec": {"imagePullSecrets": [{"name": "registry"}], "serviceAccountName": "trainer"}
    }
    for part in (found.trainer, prepare):
        names = [item.name for item in part.env], [item.secret_ref for item in part.env_from]
        assert (names[0], [item.name for item in names[1] if item]) == (["AWS_REGION"], ["s3"])
    assert found.model.cache
    assert (found.distributed.processes_per_node, found.model.cache.claim_name) == (8, "models")


OWN: dict[str, tuple[Json, Json]] = {
    "an output": (
        {"data": {**SHORT["data"], "prepare": {"output": "/mine"}}},
        {"output": "/mine"},
    ),
    "a model": ({"register": {"model": "support"}}, {"model": "support"}),
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
    "a queue": ({"runPolicy": {"queueName": "urgent"}}, {"queueName": "urgent"}),
    "a command, which writes checkpoints of its own": (
        {"trainer": {"command": ["torchrun", "mine.py"]}},
        {"checkpoint": None},
    ),
    "nothing to register": ({"register": None}, {"model": None}),
}


@pytest.mark.parametrize(("spec", "expected"), OWN.values(), ids=OWN)
def test_the_words_of_a_job_come_before_those_of_its_installation(spec: Json, expected: Json) -> None:
    found = resolved(spec_of(SHORT | spec)).to_json()
    assert {name: found.get(name) for name in expected} == expected


def test_without_an_installation_a_job_has_what_it_says() -> None:
    found = spec_of(SHORT, {})
    assert resolved(found).to_json() == {"model": "chat"}
    assert (found.checkpoint, found.model.cache) == (None, None)


def test_pods_have_the_service_account_of_the_job() -> None:
    found = spec_of(SHORT | {"serviceAccountName": "mine"})
    assert found.data.prepare
    assert [
        (template or {})["spec"]["serviceAccountName"]
        for template in (found.pod_template, found.data.prepare.pod_template)
    ] == ["mine", "mine"]


def test_a_running_job_keeps_its_folders_and_takes_new_credentials() -> None:
    later = {**INSTALLED, "storage": "s3://other", "queueName": "other", "envFrom": []}
    found = spec_of(SHORT, later, before=INSTALLED)
    assert resolved(found) == resolved(spec_of(SHORT))
    assert found.trainer.env_from == []


def test_the_last_of_equal_variables_counts() -> None:
    def value(text: str) -> list[Json]:
        return [{"name": "AWS_REGION", "value": text}]

    found = spec_of(SHORT | {"env": value("of all pods"), "trainer": {"env": value("of the trainer")}})
    assert found.data.prepare
    values = [item.value for part in (found.trainer, found.data.prepare) for item in part.env]
    assert values == ["of the trainer", "of all pods"]


def test_a_pod_template_is_over_the_gpus_and_these_over_the_installations() -> None:
    limits = {"containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}
    gpu = {"nodes": 1, "gpusPerNode": 8, "gpu": {"resourceName": "nvidia.com/mig-1g.10gb", "product": "A100"}}
    found = spec_of(SHORT | {"distributed": gpu, "podTemplate": {"spec": limits}})
    assert found.pod_template
    spec = found.pod_template["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert spec["containers"][0]["resources"]["limits"] == {
        "nvidia.com/mig-1g.10gb": "8",
        "nvidia.com/gpu": "4",
    }
