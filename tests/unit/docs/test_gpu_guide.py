"""docs/getting-started-gpu.md: with its values, the operator accepts its job, and knows what the job leaves out."""

from __future__ import annotations

import yaml

from finetune_crds import FineTuneJob, FineTuneJobSpec
from finetune_crds.pods import ROLES
from finetune_crds.reference import SAMPLES
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.decide.accept import obstacles
from finetune_operator.finetunejob.resolve import resolve, resolved
from finetune_operator.settings import Settings
from support.documents import Page
from support.manifests import VALUES

PAGE = Page("docs/getting-started-gpu.md")
(INSTALLED,) = (yaml.safe_load(block.text) for block in PAGE.blocks("yaml") if block.title == VALUES)
DEFAULTS = Defaults.model_validate(INSTALLED["defaults"])
JOB = yaml.safe_load((SAMPLES / "gpu" / "support-chat.yaml").read_text(encoding="utf-8"))


def spec() -> FineTuneJobSpec:
    """The job's spec, as the operator reads it in the guide's installation."""
    name = JOB["metadata"]["name"]
    given = FineTuneJob.model_validate(JOB).spec
    return resolve(given, namespace="research", name=name, earlier=None, defaults=DEFAULTS)


def test_the_job_is_accepted() -> None:
    settings = Settings(tracking_uri="http://mlflow:5000", defaults=DEFAULTS)
    assert INSTALLED["mlflow"]["enabled"]
    assert [*obstacles(spec(), settings, "research")] == []


def test_the_installation_fills_in_what_the_guide_shows() -> None:
    found = resolved(spec(), namespace="research", name="support-chat", defaults=DEFAULTS)
    assert found.checkpoint is not None
    assert found.output is not None
    table, _, digest = found.output.rpartition("/")
    assert digest
    assert (table, found.checkpoint.uri, found.model, found.queue_name) == (
        "s3://my-bucket/finetune/splits/research",
        "s3://my-bucket/finetune/checkpoints",
        "support-chat",
        None,
    )


def test_the_pods_have_the_secrets_that_the_guide_creates() -> None:
    created = {
        name
        for block in PAGE.blocks("console")
        for name in ("s3", "hugging-face")
        if f"kubectl create secret generic {name} --namespace research" in block.text
    }
    for role in ROLES:
        template = spec().pods.of(role).template
        assert template is not None
        (container,) = template["spec"]["containers"]
        assert {item["secretRef"]["name"] for item in container["envFrom"]} == created


def test_the_pods_have_gpus() -> None:
    template = spec().pods.train.template
    assert template is not None
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert template["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
