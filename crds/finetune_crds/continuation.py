"""Which recipes may carry on a checkpoint: those with the same settings that decide the weights and the order of examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from finetune_crds.aliased import Aliased
from finetune_crds.base import ApiModel
from finetune_crds.recipe import JobRecipe

# What another attempt, or the job that carries a run on, may change. A field that is not here counts.
_IGNORED_FIELDS: dict[str, Any] = {
    # Which job it is, what it tells, writes and registers, and what is measured after it. `parameters` are for scripts, which have
    # checkpoints of their own.
    **dict.fromkeys(
        ("kind", "job", "tracking", "register_", "evaluation", "parameters", "checkpoint", "output"), True
    ),
    # How many ranks share a step, and how: the sequences of a step count, as GLOBAL_BATCH.
    "distributed": True,
    "model": {"cache"},
    "method": {"export"},
    "training": {
        # How long it trains.
        "epochs",
        "max_steps",
        # How the ranks share a step, and compute it.
        "per_device_batch_size",
        "gradient_accumulation",
        "activation_checkpointing",
        "compile",
        # What is evaluated and reported, when the run ends, and which of its weights it delivers.
        "per_device_eval_batch_size",
        "eval_every_steps",
        "log_every_steps",
        "early_stopping",
        "select",
        "max_skipped_steps",
        # Where the end of the run begins, whose length may differ too.
        "decay_steps",
        "decay_ratio",
    },
    # How the splits were made: they are there now.
    "data": {"source", "prepare"},
    "prepared": True,
}
GLOBAL_BATCH = "globalBatch"
"""The sequences of a step, among the settings."""
ROWS_AT_ONCE = "rowsAtOnce"
"""The sequences of a forward pass on all ranks, among the settings of KTO, which estimates a divergence from them."""
# What decides the token ids and loss masks of the examples, and no more: a digest of these is compared, and the fields explain it.
_EXAMPLE_FIELDS = ("data.", "model.chatTemplate.", "objective.lossOn", "training.truncation")
_MAX_VALUE_LENGTH = 60
_DIGEST_LENGTH = 12


def settings(recipe: JobRecipe) -> dict[str, Any]:
    """The settings that count, by the paths of their fields; without defaults, so that a later version may add a field.

    A checkpoint keeps them. None of them is a secret.
    """
    content = recipe.model_dump(mode="json", by_alias=True, exclude=_IGNORED_FIELDS, exclude_defaults=True)
    values_by_path = {**dict(_leaves("", content)), GLOBAL_BATCH: recipe.global_batch}
    if recipe.objective.type == "KTO":
        values_by_path[ROWS_AT_ONCE] = recipe.training.per_device_batch_size * recipe.distributed.ranks
    return values_by_path


def digest(recipe: JobRecipe) -> str:
    """The beginning of the SHA-256 of the settings that count, but for those of the examples."""
    run_settings = {
        path: value for path, value in settings(recipe).items() if not path.startswith(_EXAMPLE_FIELDS)
    }
    return hashlib.sha256(json.dumps(run_settings, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def differences(before: Mapping[str, Any], recipe: JobRecipe) -> list[str]:
    """What keeps a recipe from carrying on a run with some settings: each difference, with what to do where that is not plain.

    Differences of the examples are left out: another table may have the same ones.
    """
    now = settings(recipe)
    differing = [
        _describe_change(path, before, now)
        for path in _changed(before, now)
        if path not in (GLOBAL_BATCH, ROWS_AT_ONCE) and not path.startswith(_EXAMPLE_FIELDS)
    ]
    if ROWS_AT_ONCE in _changed(before, now):
        differing.append(
            f"sequences per forward pass {before.get(ROWS_AT_ONCE)} -> {now.get(ROWS_AT_ONCE)} (training.perDeviceBatchSize x "
            "ranks; KTO estimates a divergence from them)"
        )
    batch = before.get(GLOBAL_BATCH)
    if batch != now[GLOBAL_BATCH] and isinstance(batch, int):
        differing.append(
            f"sequences per step {batch} -> {now[GLOBAL_BATCH]} (training.perDeviceBatchSize x gradientAccumulation x ranks; "
            f"{_suggest_batch(batch, recipe)})"
        )
    return differing


def differences_of_examples(before: Mapping[str, Any], recipe: JobRecipe) -> list[str]:
    """The fields that may explain why the examples are not those of a run with some settings."""
    now = settings(recipe)
    return [
        _describe_change(path, before, now)
        for path in _changed(before, now)
        if path.startswith(_EXAMPLE_FIELDS)
    ]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [path for path in sorted({*before, *now}) if not _same(before.get(path), now.get(path))]


def _same(before: object, now: object) -> bool:
    """Whether two values mean the same; an alias, which earlier versions kept as it is, may have meant any version of its model."""
    if before == now:
        return True
    aliased = Aliased.parse(before) if isinstance(before, str) else None
    return aliased is not None and str(now).startswith(f"models:/{aliased.model}/")


def _describe_change(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (_format_value(side[path] if path in side else _default(path)) for side in (before, now))
    return f"{path} {old} -> {new}"


def _suggest_batch(batch: int, recipe: JobRecipe) -> str:
    """Which numbers give a global batch on the ranks of a recipe."""
    ranks, size = recipe.distributed.ranks, recipe.training.per_device_batch_size
    share, remainder = divmod(batch, ranks)
    if remainder:
        return f"{batch} sequences do not divide evenly among {ranks} ranks, so choose a number of ranks that divides {batch}"
    size_per_rank = max(number for number in range(1, min(size, share) + 1) if share % number == 0)
    return f"for {ranks} ranks, set perDeviceBatchSize to {size_per_rank} and gradientAccumulation to {share // size_per_rank}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in a document, by their paths. Lists of the API are sets."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, part)
    else:
        yield path, sorted(value, key=str) if isinstance(value, list) else value


def _default(path: str) -> object:
    """The default of a field of a recipe, by its path; None where it has none."""
    part: type[ApiModel] = JobRecipe
    default: object = None
    for name in path.split("."):
        field = next((field for field in part.model_fields.values() if field.alias == name), None)
        if field is None:
            return None
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        inner = (field.annotation, *get_args(field.annotation))
        part = next((kind for kind in inner if isinstance(kind, type) and issubclass(kind, ApiModel)), part)
    return default


def _format_value(value: object) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"
