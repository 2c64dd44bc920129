"""The page for people who come from other tools: each value that it names is in the sample of its section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml

from finetune_crds.env import CODE_ENV, GATE_ENV, RESERVED_ENV
from finetune_crds.reference import SAMPLES
from support.documents import Page
from support.manifests import SCHEMAS

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


# What people had under another name, by section: the first words of a row, and the names in its answer. A name is a field, a field with
# a value that a sample of the section has, a variable of the pods, or a link.
ANSWERS: dict[str, dict[str, list[str]]] = {
    "A Databricks notebook": {
        "a table for each split": ["data.prepare.splitTables.train: support.finetuning.intents_train"],
        "`langdetect` UDF": ["languages", "redact"],
        "`log_params`": [],
        "tags `fine_tuned_on`": ["register.tags"],
        "a deployment job of MLflow 3": ["MODEL_NAME", "MODEL_VERSION", "approval"],
        "`MlflowClient.copy_model_version`; MLflow's export and import tools": [],
        "`set_registered_model_alias`": ["rollbackTo"],
        "a job's schedule: `quartz_cron_expression`, `timezone_id`, `pause_status`": [
            "schedule: 0 2 * * *",
            "timeZone: Europe/Berlin",
            "suspend",
        ],
        "a job's `max_concurrent_runs: 1`, `queue`": ["concurrencyPolicy: Forbid"],
        "a job's trigger: `table_update`, `file_arrival`": ["onlyIfDataChanged: true", "schedule"],
        "a job's trigger: `continuous`": ["concurrencyPolicy: Forbid"],
    },
    "Katib, Ray Tune, Optuna and Hyperopt": {
        "Katib `parameters[].feasibleSpace` with `min`, `max`, `step`, `distribution: logUniform`; `list`": [
            "sweep.parameters[].range",
            "min",
            "max",
            "step",
            "scale: Log",
            "values",
        ],
        "Katib `algorithm: grid`, `random`; `tpe`; Optuna `GridSampler`, `RandomSampler`, `TPESampler`": [
            "sweep.algorithm: Grid",
            "sweep.algorithm: TPE",
        ],
        "Katib `maxTrialCount`, `parallelTrialCount`, `maxFailedTrialCount`": [
            "sweep.trials",
            "sweep.parallel",
            "sweep.maxFailedTrials",
        ],
        "Ray Tune `loguniform`, `randint`, `choice`": ["range", "scale: Log", "values"],
        "Katib `objective`, Optuna `direction`": ["sweep.metric: eval_loss", "status.sweep.best"],
        "A Databricks notebook with nested MLflow runs": [],
        "Ray Tune `ASHAScheduler(grace_period, reduction_factor, max_t)`": [
            "sweep.algorithm: ASHA",
            "sweep.rungs",
            "training.maxSteps",
        ],
        "Katib `earlyStopping: medianstop`": ["sweep.algorithm: ASHA", "training.earlyStopping"],
        "`Trainer.hyperparameter_search`": ["(finetunejob/own-script.md)"],
    },
    "The `air` CLI": {
        "`experiment_name`": ["tracking.experiment"],
        "`compute.num_accelerators`, `compute.accelerator_type`": [
            "distributed.nodes",
            "distributed.gpusPerNode",
            "distributed.gpu.product",
        ],
        "`compute.pool_id`, `compute.priority_class`": ["runPolicy.queueName", "pods.train.template"],
        "`environment.dependencies`": ["trainer.dependencies"],
        "`environment.version`, `environment.unity_catalog_image`": ["pods.train.image"],
        "`code_source.snapshot.root_path` `code_source.root_path`": [
            "trainer.code.volume",
            "CODE_SOURCE_PATH",
            "(#how-to)",
        ],
        "`command`": ["trainer.command"],
        "`env_variables`, `secrets`": ["pods.all.env", "pods.all.envFrom"],
        "`max_retries`, `timeout_minutes`": ["runPolicy.maxRestarts", "runPolicy.activeDeadlineSeconds"],
        "`parameters`, `HYPERPARAMETERS_PATH`": ["trainer.parameters", "HYPERPARAMETERS_PATH"],
        "`MLFLOW_RUN_ID`": ["MLFLOW_RUN_ID"],
        "a checkpoint in `/Volumes`": ["output.from", "output.uri"],
        "`--dry-run`, `--watch`, `logs --node 1`": ["(#how-to)"],
        "`--override compute.num_accelerators=32`": ["(#how-to)"],
        # Lines of a script, which tests/trainer/test_air_cli.py checks.
        "`init_process_group": [],
        "`torch.cuda.set_device": [],
        "`offload_to_cpu=True`": [],
    },
    "A NeMo Automodel recipe": {
        "`checkpoint.staging_dir`": ["TMPDIR", "trainer.args"],
        "`--section.field value` on the command line": ["trainer.args"],
        "a recipe file of your own": ["trainer.code.configMapRef", "trainer.code.git", "trainer.args"],
        # It goes on by itself.
        "`checkpoint.restore_from`": [],
        "`epoch_*_step_*/model/consolidated`": ["output.uri: s3://models/squad-llama-1b", "model.base"],
    },
    "Accelerate, DeepSpeed and Lightning scripts": {
        "the script under torchrun": ["trainer.command"],
        "its arguments or its YAML file": ["trainer.args", "trainer.parameters", "HYPERPARAMETERS_PATH"],
        "metrics of the tracker for MLflow": ["(finetunejob/own-script.md#progress)"],
        "W&B": ["tracking.sinks", "type: WandB", "secretRef"],
        "TensorBoard": ["tracking.sinks", "type: TensorBoard", "TENSORBOARD_LOGGING_DIR"],
        "spot machines": ["pods.train.template", "runPolicy.maxRestarts"],
    },
}
# Names that are neither fields nor variables that the operator sets.
OTHER_NAMES = {"split", "TMPDIR", "TENSORBOARD_LOGGING_DIR"}


class Row(NamedTuple):
    """A row of a table: what people had, with a space between two columns, and the answer."""

    subject: str
    answer: str


def table_rows(section: str) -> list[Row]:
    """Return the rows of the tables of a section, without their headings."""
    lines = re.findall(r"^\| ?(.*) \|$(?!\n\|--)", dict(sections(PAGE.text))[section], re.MULTILINE)
    cells = [line.split(" | ") for line in lines]
    return [Row(" ".join(left).removeprefix("| "), answer) for *left, answer in cells]


def find_fields(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each field below an object; `[]` stands for the items of a list."""
    if isinstance(value, list):
        for item in value:
            yield from find_fields(item, f"{path}[]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield f"{path}.{name}", item
            yield from find_fields(item, f"{path}.{name}")


def find_schema_fields(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field below a schema."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from find_schema_fields(field, f"{path}.{name}")
        yield from find_schema_fields(field.get("items", {}), f"{path}.{name}[]")


FIELDS = {field for schema in SCHEMAS.values() for field in find_schema_fields(schema)}
VARIABLES = {*RESERVED_ENV, CODE_ENV, *GATE_ENV}


def find_mistake(section: str, name: str, answer: str) -> str | None:
    """Return what is wrong with a name in the answer of a row."""
    if name.startswith("("):
        return None if f"]{name}" in answer else "is not linked"
    if not re.search(rf"`{re.escape(name)}(: [^`]+)?`", answer):
        return "is not in the answer"
    field, _, value = name.partition(": ")
    if field in VARIABLES | OTHER_NAMES:
        return None
    if not any(path.endswith(f".{field}") for path in FIELDS):
        return "is no field"
    values = [
        item
        for spec in sample_specs(section)
        for path, item in find_fields(spec)
        if path.endswith(f".{field}")
    ]
    return "is in no sample of the section" if value and parse(value) not in values else None


@pytest.mark.parametrize("section", ANSWERS)
def test_what_people_had_has_an_answer(section: str) -> None:
    wrong = []
    for subject, names in ANSWERS[section].items():
        answers = [row.answer for row in table_rows(section) if row.subject.startswith(subject)]
        wrong += [f"{subject}: {len(answers)} rows"] if len(answers) != 1 else []
        mistakes = [(name, find_mistake(section, name, answer)) for answer in answers for name in names]
        wrong += [f"{subject}: {name} {mistake}" for name, mistake in mistakes if mistake]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "answer", "mistake"),
    [
        ("(#how-to)", "How to", "is not linked"),
        ("sweep.parallel", "`sweep.parallels`", "is not in the answer"),
        ("sweep.parallels", "`sweep.parallels`", "is no field"),
        ("sweep.trials: 5", "`sweep.trials: 5`", "is in no sample of the section"),
        ("sweep.trials: 6", "`sweep.trials: 6`", None),
    ],
)
def test_an_answer_that_is_wrong_is_found(name: str, answer: str, mistake: str | None) -> None:
    assert find_mistake("Katib, Ray Tune, Optuna and Hyperopt", name, answer) == mistake


@pytest.mark.parametrize("section", [heading for heading, _ in sections(PAGE.text)])
def test_every_row_is_checked(section: str) -> None:
    subjects = [*ROWS.get(section, []), *ANSWERS.get(section, {})]
    unchecked = [
        row.subject
        for row in table_rows(section)
        if not _VALUE.search(row.answer) and not any(row.subject.startswith(subject) for subject in subjects)
    ]
    assert unchecked == []


def test_automodel_has_its_staging_dir_in_args() -> None:
    args = [read_field(spec, "trainer.args") or [] for spec in sample_specs("A NeMo Automodel recipe")]
    assert "--checkpoint.staging_dir" in [item for items in args for item in items]
    assert not any("staging" in field.lower() for field in FIELDS if ".checkpoint." in field)


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
