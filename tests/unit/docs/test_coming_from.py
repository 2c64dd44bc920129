"""The page for people who come from other tools: each value that it names is in the sample of its section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml

from finetune_crds.reference import SAMPLES
from support.documents import Page

PAGE = Page("docs/coming-from.md")
_SAMPLE = re.compile(r"samples\.md#([\w-]+)\)")
# A field of the API with its value, for example `training.epochs: 3`.
_VALUE = re.compile(r"`((?:[a-zA-Z_]+\.)+\w+): ([^`]+)`")


class Value(NamedTuple):
    """A field that a section names with its value."""

    section: str
    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.section}: {self.field}"


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        yield heading, body


def values(text: str) -> list[Value]:
    """Return the fields that the tables name with a value."""
    return [
        Value(heading, *match.groups()) for heading, body in sections(text) for match in _VALUE.finditer(body)
    ]


def read_field(spec: Any, field: str) -> Any:
    """Return the value of a field by its path; None if a spec lacks it."""
    for name in field.split("."):
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec


def parse(text: str) -> Any:
    """Return a value as YAML has it. YAML 1.1 takes 2e-4 for a text."""
    value = yaml.safe_load(text)
    return float(value) if isinstance(value, str) and re.fullmatch(r"\de-\d", value) else value


def sample_specs(section: str) -> list[Any]:
    """Return the specs in the samples that a section of the page links to."""
    body = dict(sections(PAGE.text))[section]
    documents = [
        document
        for name in _SAMPLE.findall(body)
        for document in yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    ]
    return [document["spec"] for document in documents if "spec" in document]


@pytest.mark.parametrize("value", values(PAGE.text), ids=str)
def test_a_value_is_in_the_sample(value: Value) -> None:
    in_samples = [read_field(spec, value.field) for spec in sample_specs(value.section)]
    assert parse(value.text) in in_samples


def test_a_value_that_differs_is_found() -> None:
    text = "## A Databricks notebook\n| a | `training.epochs: 4`, `training.epoch: 3` |\n"
    wrong = [
        value.field
        for value in values(text)
        if parse(value.text) not in [read_field(spec, value.field) for spec in sample_specs(value.section)]
    ]
    assert wrong == ["training.epochs", "training.epoch"]


# What people ask for that is done elsewhere or not at all, by section: the first words of a row.
ROWS: dict[str, list[str]] = {
    "How to": [
        "see the log of one node",
        "check a job without running it",
        "watch it",
        "put a folder of code into a ConfigMap",
        "put a folder of code on a claim",
        "change a few fields of a manifest",
    ],
    "What is not there": [
        "autoscaling of the new cluster of a Databricks run",
        "FP16 compression of gradients",
        "Horovod scripts",
        "Megatron",
        "Neptune",
        "vision language models",
        "TPU",
        "DiLoCo",
        "GPUs of other people",
        "`dbfs:/`",
    ],
}


@pytest.mark.parametrize("section", ROWS)
def test_what_people_ask_for_has_a_row(section: str) -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", dict(sections(PAGE.text))[section], re.MULTILINE)[1:]
    assert [subject for subject in ROWS[section] if not any(row.startswith(subject) for row, _ in rows)] == []
    assert [row for row, answer in rows if len(answer) < 20] == []


# What the published notebook sets, beyond the defaults of its libraries, by the field that sets it.
NOTEBOOK: dict[str, Any] = {
    "data.prepare.minQuality": 0.85,
    "data.prepare.qualityColumn": "quality_score",
    "data.prepare.notNull": ["intent_label"],
    "data.prepare.minPromptChars": 20,
    "data.prepare.maxPromptChars": 2048,
    "data.prepare.dedupe.columns": ["message_hash"],
    "data.prepare.limit": 500000,
    "data.prepare.maxTokens": 512,
    "data.prepare.promptTemplate": "[INST] Classify the intent of this support message:\n\n{message} [/INST]",
    "data.prepare.responseTemplate": " {intent_label}",
    "data.prepare.splitRatios.train": 0.8,
    "data.prepare.splitRatios.validation": 0.1,
    "data.prepare.splitRatios.test": 0.1,
    "data.prepare.splitRatios.seed": 42,
    "method.type": "QLoRA",
    "method.quantization": {"type": "NF4", "doubleQuantization": True},
    "method.lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targetModules": ["q_proj", "v_proj"]},
    "objective": {"type": "SFT", "lossOn": "All"},
    "training": {
        "epochs": 3,
        "perDeviceBatchSize": 4,
        "gradientAccumulation": 8,
        "learningRate": 2e-4,
        "scheduler": "Linear",
        "warmupRatio": 0.03,
        "maxLength": 512,
        "packing": False,
        "precision": "BF16",
        "evalEverySteps": 200,
        "logEverySteps": 50,
        "select": "Best",
    },
    "distributed": {"gpusPerNode": 1},
    "checkpoint.everySteps": 200,
    "register.aliases": ["candidate"],
    "register.tags": {"fine_tuned_on": "support.gold.messages"},
}


def test_the_sample_of_the_notebook_is_the_notebook() -> None:
    (spec,) = (
        document["spec"]
        for document in yaml.safe_load_all((SAMPLES / "databricks-notebook.yaml").read_text(encoding="utf-8"))
    )
    assert {field: read_field(spec, field) for field in NOTEBOOK} == NOTEBOOK


# What the published train.yaml and its script set, by the field that sets it.
AIR: dict[str, Any] = {
    "distributed.nodes": 2,
    "distributed.gpusPerNode": 8,
    "distributed.networkInterface": "eth0",
    "trainer.parameters": {
        "model_name": "meta-llama/Llama-3.1-8B",
        "dataset_name": "tatsu-lab/alpaca",
        "max_seq_len": 1024,
        "per_device_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-5,
        "max_steps": 100,
        "activation_checkpointing": True,
        "output_dir": "/mnt/output",
    },
    "output.from": "/mnt/output",
    "runPolicy": {"maxRestarts": 3, "activeDeadlineSeconds": 21600},
}


def test_the_sample_of_the_air_cli_is_its_example() -> None:
    (spec,) = (
        document["spec"]
        for document in yaml.safe_load_all((SAMPLES / "air-cli.yaml").read_text(encoding="utf-8"))
    )
    assert {field: read_field(spec, field) for field in AIR} == AIR
    (_, _, command) = spec["trainer"]["command"]
    assert command == (
        "cd $CODE_SOURCE_PATH && torchrun --nnodes=$NUM_NODES --node_rank=$NODE_RANK --nproc_per_node=$LOCAL_WORLD_SIZE "
        "--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT train.py"
    )
