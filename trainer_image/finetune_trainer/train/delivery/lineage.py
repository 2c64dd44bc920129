"""The origin of a model, as parameters and tags in MLflow and as the model card."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune_crds import contract
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, Dpo, Kto, Objective, Orpo, RewardModel, Simpo
from finetune_crds.training import LOW_RANK_METHODS, SOFT_PROMPT_METHODS, Lora, Quantization, SoftPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from finetune_crds.contract import TrainResult
    from finetune_crds.data import Splits
    from finetune_crds.recipe import Recipe
    from finetune_crds.source import TableLocation
    from finetune_trainer.train.data.corpus import Corpus
    from finetune_trainer.train.data.dataset import Split

_VERSION = re.compile(r"models:/(?P<model>[^/@]+)/(?P<version>[0-9]+)")
# Unity Catalog's limit for the value of a tag.
_MAX_TAG_CHARS = 1000


@dataclass(frozen=True)
class Counts:
    """Examples and tokens of a split."""

    examples: int
    tokens: int

    @classmethod
    def of(cls, split: Split) -> Counts:
        """Count a tokenized split."""
        return cls(len(split), int(split.offsets[-1]))


@dataclass(frozen=True)
class Lineage:
    """The origin of a model and its evaluation."""

    recipe: Recipe
    splits: Splits
    result: TrainResult
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """By name of the split."""
    eval_data: str | None = None
    """Identifies the evaluation (`identify_eval_data`); None without a validation split."""
    weights_step: int | None = None
    """Step of the weights; None: they are the last."""
    resumed_from: str = ""
    """The checkpoint of another job that the run began with; empty if there is none."""


def identify_eval_data(recipe: Recipe, validation: Split | None) -> str | None:
    """Return an identifier of the evaluation: losses with the same identifier are comparable. None without a validation split.

    The identifier has the digest of the tokenized split. For objectives other than SFT, it also has a digest of the parameters of the
    loss, and of the reference (the base) or the teacher, if any. For KTO, the settings that divide the examples into passes are part of
    this digest, because each pass estimates a divergence. Label smoothing and noise do not count, because evaluations have neither.
    """
    objective = recipe.objective
    if validation is None:
        return None
    if objective.type == "SFT":
        return validation.digest
    if objective.type == "DPO":
        dpo = objective.dpo or Dpo()
        # NB: identifiers of earlier releases do not have the loss, so the default loss is left out.
        excluded = {"label_smoothing"} | ({"loss"} if dpo.loss == "Sigmoid" else set())
        parameters: list[object] = [
            recipe.model.base,
            recipe.model.revision,
            dpo.model_dump_json(exclude=excluded),
        ]
    elif objective.type == "KTO":
        kto = (objective.kto or Kto()).model_dump_json()
        parameters = [recipe.model.base, recipe.model.revision, kto, *_list_pass_settings(recipe)]
    elif objective.type == "ORPO":
        parameters = [(objective.orpo or Orpo()).model_dump_json()]
    elif objective.type == "RewardModel":
        # The coefficient is not part of evaluation losses.
        parameters = []
    elif objective.type == "SimPO":
        parameters = [(objective.simpo or Simpo()).model_dump_json()]
    else:
        # Distillation. NB: fields that identifiers of earlier releases do not have are excluded: the newer fields of a distillation unless
        # they are set, and the fields of other objectives.
        newer = {"teacher_revision", "teacher_trust_remote_code"}
        unset = newer - (objective.distillation.model_fields_set if objective.distillation else set())
        of_other_objectives = dict.fromkeys(("kto", "orpo", "simpo", "reward_model", "label_smoothing"), True)
        parameters = [objective.model_dump_json(exclude={"distillation": unset, **of_other_objectives})]
    digest = hashlib.blake2b(json.dumps(parameters).encode(), digest_size=8).hexdigest()
    return f"{validation.digest}-{objective.type}-{digest}"


def identify_evaluation(recipe: Recipe, validation: Split | None) -> str | None:
    """Return an identifier of the evaluation and of the number that earlyStopping and select compare. None without a validation split."""
    eval_data, monitor = identify_eval_data(recipe, validation), recipe.training.monitor
    return (
        eval_data if eval_data is None or monitor is None or monitor == "Loss" else f"{eval_data}-{monitor}"
    )


def _list_pass_settings(recipe: Recipe) -> list[int]:
    """Return what decides on the examples of an evaluation pass: tokens of a document, packing, and the rows on all ranks."""
    training, gang = recipe.training, recipe.distributed
    rows = training.per_device_eval_batch_size or training.per_device_batch_size
    return [training.max_length, training.packing, rows * gang.ranks]


def build_run_params(recipe: Recipe, corpus: Corpus, resumed_from: str = "") -> dict[str, object]:
    """Return the parameters of a run, by their names in MLflow."""
    training, plan = recipe.training, corpus.plan
    return {
        "base_model": recipe.model.base,
        **({"adapter": "Continue"} if recipe.model.adapter == "Continue" else {}),
        **({"new_tokens": len(recipe.model.new_tokens)} if recipe.model.new_tokens else {}),
        "method": recipe.method.type,
        "objective": recipe.objective.type,
        "train_samples": len(corpus.train),
        "val_samples": len(corpus.validation.split) if corpus.validation else 0,
        "epochs": plan.total / len(plan.sequences),
        "max_steps": plan.max_steps,
        "effective_batch": plan.global_batch,
        "learning_rate": training.learning_rate,
        "scheduler": training.scheduler,
        "max_length": training.max_length,
        "packing": training.packing,
        "precision": training.precision,
        "optimizer": training.optimizer.type,
        "seed": training.seed,
        "recipe": recipe.digest(),
        **({"resumed_from": resumed_from} if resumed_from else {}),
        **build_method_params(recipe),
    }


def build_method_params(recipe: Recipe) -> dict[str, object]:
    """Return the parameters of method and objective, with defaults, by their names in MLflow."""
    method, objective = recipe.method, recipe.objective
    params: dict[str, object] = {}
    if method.type in LOW_RANK_METHODS:
        lora = method.lora or Lora()
        params |= {
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": ",".join(lora.target_modules) or "all-linear",
            "use_rslora": lora.scaling == "RankStabilized",
            **({"init": lora.init} if lora.init != "Default" else {}),
            **({"bias": lora.bias} if lora.bias else {}),
            **({"modules_to_save": ",".join(lora.modules_to_save)} if lora.modules_to_save else {}),
            "merge": bool(method.export == "Merged"),
        }
    if method.type == "QLoRA":
        quantization = method.quantization or Quantization()
        params |= {
            "quantization": quantization.type,
            "double_quantization": quantization.double_quantization,
        }
    if method.type in SOFT_PROMPT_METHODS:
        params["virtual_tokens"] = (method.soft_prompt or SoftPrompt()).virtual_tokens
    params |= _build_objective_params(objective)
    if recipe.training.neftune_alpha is not None:
        params["neftune_alpha"] = recipe.training.neftune_alpha
    return params


def _build_objective_params(objective: Objective) -> dict[str, object]:
    if objective.type in COLUMNS_OF_OBJECTIVE:
        return _build_preference_params(objective)
    if objective.distillation is not None:
        return {
            "teacher": objective.distillation.teacher,
            **_revision("teacher_revision", objective.distillation.teacher_revision),
            "temperature": objective.distillation.temperature,
            "teacher_weight": objective.distillation.weight,
        }
    return _smoothing(objective.label_smoothing or 0.0)


def _build_preference_params(objective: Objective) -> dict[str, object]:
    if objective.type == "DPO":
        dpo = objective.dpo or Dpo()
        loss = {} if dpo.loss == "Sigmoid" else {"dpo_loss": dpo.loss}
        return {"beta": dpo.beta, **loss, **_smoothing(dpo.label_smoothing)}
    if objective.type == "KTO":
        kto = objective.kto or Kto()
        return {
            "beta": kto.beta,
            "desirable_weight": kto.desirable_weight,
            "undesirable_weight": kto.undesirable_weight,
        }
    if objective.type == "ORPO":
        return {"odds_ratio_weight": (objective.orpo or Orpo()).weight}
    if objective.type == "SimPO":
        simpo = objective.simpo or Simpo()
        return {"beta": simpo.beta, "gamma": simpo.gamma}
    coefficient = (objective.reward_model or RewardModel()).center_rewards_coefficient
    return {"center_rewards_coefficient": coefficient} if coefficient else {}


def _smoothing(share: float) -> dict[str, object]:
    return {"label_smoothing": share} if share else {}


def _revision(name: str, revision: str | None) -> dict[str, object]:
    return {} if revision is None else {name: revision}


def build_source_tags(
    recipe: Recipe, splits: Splits, eval_data: str | None, resumed_from: str = ""
) -> dict[str, str]:
    """Return the tags of a run or of a registered version that name its sources and its evaluation data."""
    tags = {
        contract.TAG_RECIPE: recipe.digest(),
        contract.TAG_DATA_PATH: splits.address,
    }
    if splits.versions:
        tags[contract.TAG_DATA_VERSION] = splits.versions
    tags |= _tag_sources(recipe)
    if eval_data is not None:
        tags[contract.TAG_EVAL_DATA] = eval_data
    if resumed_from:
        tags[contract.TAG_RESUMED_FROM] = resumed_from
    elif base_version := _find_base_version(recipe):
        tags[contract.TAG_BASE_VERSION] = base_version
    return tags


def _find_base_version(recipe: Recipe) -> str | None:
    """Return the version of the registered model that the training starts from; None if it starts from another model."""
    # The operator has replaced an alias by its version.
    match = _VERSION.fullmatch(recipe.model.base)
    if match is None or recipe.register_ is None or match["model"] != recipe.register_.model:
        return None
    return match["version"]


@dataclass(frozen=True)
class ReadSource:
    """A source of the preparation or its feedback, as it was read.

    version: the version of a Delta table; None for other sources.
    revision: the commit of a data set of the Hub; None for other sources.
    """

    source: TableLocation
    version: int | None
    revision: str | None

    @property
    def at(self) -> str | None:
        """The version or the commit of the source; None for files, which have neither."""
        return self.revision if self.version is None else str(self.version)


def list_sources(recipe: Recipe) -> list[ReadSource]:
    """Return the sources that the splits were prepared from; empty if the job did not prepare them."""
    prepared, source = recipe.prepared, recipe.data.source
    if prepared is None or source is None:
        return []
    if source.sources is None:
        feedback = source.feedback
        return [
            ReadSource(source, prepared.source_version, prepared.source_revision),
            *([ReadSource(feedback, prepared.feedback_version, None)] if feedback else []),
        ]
    prepared_by_name = {part.name: part for part in prepared.sources or []}
    sources: list[ReadSource] = []
    for part in source.sources:
        prepared_part = prepared_by_name.get(part.name)
        version = prepared_part.version if prepared_part else None
        revision = prepared_part.revision if prepared_part else None
        sources.append(ReadSource(part, version, revision))
    return sources


def _tag_sources(recipe: Recipe) -> dict[str, str]:
    sources = list_sources(recipe)
    tags = {contract.TAG_SOURCE: _join_for_tag(read.source.address for read in sources)} if sources else {}
    if any(read.at for read in sources):
        tags[contract.TAG_SOURCE_VERSION] = _join_for_tag(read.at or "-" for read in sources)
    if recipe.prepared is not None and recipe.prepared.digest is not None:
        tags[contract.TAG_DATA_DIGEST] = recipe.prepared.digest
    return tags


def _join_for_tag(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return text if len(text) <= _MAX_TAG_CHARS else f"{text[: _MAX_TAG_CHARS - 3]}..."


def build_preparation_tags(recipe: Recipe) -> dict[str, str]:
    """Return the tags with the result of the preparation, for the run."""
    prepared = recipe.prepared
    if prepared is None:
        return {}
    tags: dict[str, str] = {}
    if prepared.rows is not None:
        tags[contract.TAG_DATA_ROWS] = json.dumps(prepared.rows.to_json())
    if prepared.tokens is not None:
        tags[contract.TAG_DATA_TOKENS] = json.dumps(prepared.tokens.to_json())
    if prepared.dropped:
        rows_by_step = {step.step: step.rows for step in prepared.dropped}
        tags[contract.TAG_DATA_DROPPED] = json.dumps(rows_by_step)
    return tags


def build_version_tags(lineage: Lineage) -> dict[str, str]:
    """Return the tags of the registered version: the recipe's tags, the lineage and the metrics."""
    recipe, result = lineage.recipe, lineage.result
    metrics = {contract.TAG_EVAL_LOSS: result.eval_loss, contract.TAG_PERPLEXITY: result.perplexity}
    return {
        **(recipe.register_.tags if recipe.register_ else {}),
        **build_source_tags(recipe, lineage.splits, lineage.eval_data, lineage.resumed_from),
        **{name: f"{value:.6g}" for name, value in metrics.items() if value is not None},
    }


def build_metadata(lineage: Lineage) -> dict[str, object]:
    """Return the metadata of MLmodel: base model, method and version of the data."""
    recipe, data_version = lineage.recipe, lineage.splits.version
    return {
        "base_model": recipe.model.base,
        "finetuning": recipe.method.type,
        **({} if data_version is None else {"data_version": data_version}),
    }


def render_model_card(lineage: Lineage) -> str:
    """Render the README of the model: its origin, its method and its evaluation."""
    recipe, result, splits = lineage.recipe, lineage.result, lineage.splits
    location = str(splits.train) if splits.path is None else f"{splits.path} version {splits.version}"
    metrics = {
        "Evaluation loss before training": result.base_eval_loss,
        "Evaluation loss": result.eval_loss,
        "Perplexity": result.perplexity,
    }
    name = recipe.register_.model if recipe.register_ else recipe.job.name
    steps = f"{result.step} steps"
    if lineage.weights_step is not None:
        steps = f"the weights after step {lineage.weights_step} of {result.step}, which have the lowest evaluation loss,"
    resumed = f", continued from the checkpoint {lineage.resumed_from}" if lineage.resumed_from else ""
    pipeline = "text-classification" if recipe.objective.type == "RewardModel" else "text-generation"
    head = f"---\nlibrary_name: transformers\npipeline_tag: {pipeline}\n"
    sections = (
        f"{head}base_model: {recipe.model.base}\n---\n# {name}\n",
        f"{recipe.model.base}, fine-tuned ({recipe.method.type}, {recipe.objective.type}) by the FineTuneJob "
        f"{recipe.job.namespace}/{recipe.job.name}: {steps} on {location}{resumed}.\n",
        _render_table(
            "", ("", ""), [(metric, f"{value:.4f}") for metric, value in metrics.items() if value is not None]
        ),
        _render_table(
            "## Data\n\n",
            ("Split", "Examples", "Tokens"),
            [
                (split, f"{counts.examples:,}", f"{counts.tokens:,}")
                for split, counts in lineage.counts.items()
            ],
        ),
        _render_table(
            "## Method\n\n",
            ("Parameter", "Value"),
            [(parameter, str(value)) for parameter, value in build_method_params(recipe).items()],
        ),
        f"## Recipe {recipe.digest()}\n\n```yaml\n{recipe.to_yaml()}```\n",
    )
    return "\n".join(section for section in sections if section)


def _render_table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Render a Markdown table under a title; empty without rows."""
    if not rows:
        return ""
    lines = [head, ("---",) * len(head), *rows]
    return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)
