"""Compares recipes: a run can continue from a checkpoint if the settings that determine the weights and the order of examples are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from finetune_crds.aliased import Aliased
from finetune_crds.base import ApiModel
from finetune_crds.recipe import JobRecipe

# Fields that can differ between the run that wrote a checkpoint and the run that continues from it, as `exclude` of model_dump. All
# other fields must be equal, except for _EXAMPLE_FIELDS.
_IGNORED_FIELDS: dict[str, Any] = {
    # The identity of the job, what it reports, writes and registers, and its evaluation. `parameters` are for your own scripts,
    # which write their own checkpoints.
    **dict.fromkeys(
        ("kind", "job", "tracking", "register_", "evaluation", "parameters", "checkpoint", "output"), True
    ),
    # The number of ranks and the strategy. The number of sequences in a step must still be equal, see GLOBAL_BATCH.
    "distributed": True,
    "model": {"cache"},
    "method": {"export"},
    "training": {
        # The length of the training.
        "epochs",
        "max_steps",
        # How a step is divided among the ranks, and how it is computed.
        "per_device_batch_size",
        "gradient_accumulation",
        "activation_checkpointing",
        "compile",
        # Evaluation, reporting, the end of the run, and the choice of the delivered checkpoint.
        "per_device_eval_batch_size",
        "eval_every_steps",
        "log_every_steps",
        "early_stopping",
        "select",
        "monitor",
        "max_skipped_steps",
        # The decay at the end of the run, which depends on its length.
        "decay_steps",
        "decay_ratio",
    },
    # The preparation: the splits exist already.
    "data": {"source", "prepare"},
    "prepared": True,
    "metrics_step": True,
}
GLOBAL_BATCH = "globalBatch"
"""Key of a setting: the sequences of an optimizer step on all ranks."""
ROWS_AT_ONCE = "rowsAtOnce"
"""Key of a setting of KTO: the rows of a forward pass on all ranks, one sequence each, from which KTO estimates a divergence."""
# Beginnings of the paths of fields that affect only the token ids and loss masks of the examples. These fields may differ: the trainer
# compares a digest of the examples instead, and the fields explain a different digest.
_EXAMPLE_FIELDS = ("data.", "model.chatTemplate.", "objective.lossOn", "training.truncation")
_MAX_VALUE_LENGTH = 60
_DIGEST_LENGTH = 12


def settings(recipe: JobRecipe) -> dict[str, Any]:
    """Return the settings that must be equal, and the fields of the examples, by field path.

    For example: {"model.base": "Qwen/Qwen3-8B", "training.learningRate": 0.0002, "globalBatch": 32}.

    A checkpoint stores these settings, which contain no secrets. Defaults are left out, so that a field which a later version of the
    API adds does not count as a difference.
    """
    content = recipe.model_dump(mode="json", by_alias=True, exclude=_IGNORED_FIELDS, exclude_defaults=True)
    values_by_path = {**dict(_leaves("", content)), GLOBAL_BATCH: recipe.global_batch}
    if recipe.objective.type == "KTO":
        values_by_path[ROWS_AT_ONCE] = recipe.training.per_device_batch_size * recipe.distributed.ranks
    return values_by_path


def digest(recipe: JobRecipe) -> str:
    """Return a short SHA-256 of the settings that must be equal, without `_EXAMPLE_FIELDS`."""
    run_settings = {
        path: value for path, value in settings(recipe).items() if not path.startswith(_EXAMPLE_FIELDS)
    }
    return hashlib.sha256(json.dumps(run_settings, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def differences(before: Mapping[str, Any], recipe: JobRecipe) -> list[str]:
    """Return the differences that prevent a recipe from continuing a run. A difference names its remedy if that is not obvious.

    The fields of the examples are left out: other splits can contain the same examples.

    Args:
        before: the settings of the run.
        recipe: the recipe that should continue the run.
    """
    now = settings(recipe)
    changed_paths = _changed(before, now)
    differing = [
        _describe_change(path, before, now)
        for path in changed_paths
        if path not in (GLOBAL_BATCH, ROWS_AT_ONCE) and not path.startswith(_EXAMPLE_FIELDS)
    ]
    if ROWS_AT_ONCE in changed_paths:
        differing.append(
            f"sequences per forward pass {before.get(ROWS_AT_ONCE)} -> {now.get(ROWS_AT_ONCE)} (training.perDeviceBatchSize x "
            "ranks; KTO estimates a divergence from them)"
        )
    batch = before.get(GLOBAL_BATCH)
    # Without a stored batch, there is nothing to compare.
    if batch != now[GLOBAL_BATCH] and isinstance(batch, int):
        differing.append(
            f"sequences per step {batch} -> {now[GLOBAL_BATCH]} (training.perDeviceBatchSize x gradientAccumulation x ranks; "
            f"{_suggest_batch(batch, recipe)})"
        )
    return differing


def differences_of_examples(before: Mapping[str, Any], recipe: JobRecipe) -> list[str]:
    """Return the fields that can explain why the examples of a recipe differ from the examples of a run.

    Args:
        before: the settings of the run.
        recipe: the recipe that should continue the run.
    """
    now = settings(recipe)
    return [
        _describe_change(path, before, now)
        for path in _changed(before, now)
        if path.startswith(_EXAMPLE_FIELDS)
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [path for path in sorted({*before, *now}) if not _same(before.get(path), now.get(path))]


def _same(before: object, now: object) -> bool:
    """Whether two values are equal.

    Earlier versions of the operator stored models:/name@alias unresolved: such a value equals every version of the model.
    """
    if before == now:
        return True
    aliased = Aliased.parse(before) if isinstance(before, str) else None
    return aliased is not None and str(now).startswith(f"models:/{aliased.model}/")


def _describe_change(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    # Settings with their default are not stored.
    default = _default(path)
    return f"{path} {_format_value(before.get(path, default))} -> {_format_value(now.get(path, default))}"


def _suggest_batch(batch: int, recipe: JobRecipe) -> str:
    """Return, as part of a sentence, how to get a global batch: settings for the ranks of a recipe, or another number of ranks."""
    ranks, max_size = recipe.distributed.ranks, recipe.training.per_device_batch_size
    sequences_per_rank, remainder = divmod(batch, ranks)
    if remainder:
        return f"{batch} sequences do not divide evenly among {ranks} ranks, so choose a number of ranks that divides {batch}"
    # The largest divisor that needs no more memory than the recipe.
    new_size = max(
        size for size in range(1, min(max_size, sequences_per_rank) + 1) if sequences_per_rank % size == 0
    )
    accumulation = sequences_per_rank // new_size
    return (
        f"for {ranks} ranks, set perDeviceBatchSize to {new_size} and gradientAccumulation to {accumulation}"
    )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the values of a JSON document, by path. Lists are sorted, since the lists of the API are sets."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, part)
    else:
        yield path, sorted(value, key=str) if isinstance(value, list) else value


def _default(path: str) -> object:
    """Return the default of a field of a recipe, by its path; None if the field has no default."""
    part: type[ApiModel] = JobRecipe
    default: object = None
    for name in path.split("."):
        field = next((field for field in part.model_fields.values() if field.alias == name), None)
        if field is None:
            return None
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        # The model of the field, which can be a choice of a union, such as Lora | None.
        types = (field.annotation, *get_args(field.annotation))
        part = next((kind for kind in types if isinstance(kind, type) and issubclass(kind, ApiModel)), part)
    return default


def _format_value(value: object) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"
