"""Continues the training of an adapter: its configuration becomes the method, its weights the initial values."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from finetune_crds.base import first_mistake
from finetune_crds.training import Lora
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.network import task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from finetune_crds.recipe import Recipe

_WEIGHTS_FILE = "adapter_model.safetensors"
# Fields that method.lora can represent, and fields that do not affect the layers.
_SUPPORTED_FIELDS = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "task_type",
        "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "megatron_core",
        "loftq_config", "runtime_config", "bias", "modules_to_save", "ensure_weight_tying",
    }
)  # fmt: skip
# Initializations that do not change the weights of the base.
INITIALIZATIONS_KEEPING_BASE = (True, False, "gaussian")
# Values of method.lora.bias by the values of peft.
_BIASES: dict[str, Literal["All", "LoraOnly"]] = {"all": "All", "lora_only": "LoraOnly"}


def apply_adapter_config(recipe: Recipe, adapter: Path) -> Recipe:
    """Return the recipe with the configuration of the adapter in folder `adapter` as method.lora.

    Raises:
        RecipeRefusedError: the adapter does not match method.type, or sets fields that the trainer does not support.
    """
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _refusal(recipe, f"has a configuration that cannot be read: {error}") from error
    if not isinstance(config, peft.LoraConfig):
        raise _refusal(recipe, f"is a {getattr(config.peft_type, 'value', config.peft_type)} adapter")
    if config.use_dora != (recipe.method.type == "DoRA"):
        expected_method = "DoRA" if config.use_dora else "LoRA or QLoRA"
        raise _refusal(
            recipe, f"is not an adapter of method {recipe.method.type}: set method.type {expected_method}"
        )
    if task.of_adapter(config) != task.of_recipe(recipe):
        raise _refusal(recipe, _explain_task(task.of_adapter(config)))
    unsupported_fields = _find_unsupported_fields(config)
    if unsupported_fields:
        raise _refusal(
            recipe,
            f"has settings that the trainer does not support ({', '.join(unsupported_fields)}): set model.adapter Merge",
        )
    target_modules = sorted(config.target_modules or ())
    modules_to_save = sorted(config.modules_to_save or ())
    try:
        lora = Lora(
            rank=config.r,
            alpha=int(config.lora_alpha),
            dropout=config.lora_dropout,
            scaling="RankStabilized" if config.use_rslora else "Standard",
            bias=_BIASES.get(config.bias),
        )
    except ValidationError as error:
        where, what = first_mistake(error)
        raise _refusal(
            recipe, f"has a value that method.lora.{where} does not accept ({what}): set model.adapter Merge"
        ) from error
    # NB: `model_copy` skips validation: Lora limits the number of names, but an adapter lists the modules of all layers.
    lora = lora.model_copy(update={"target_modules": target_modules, "modules_to_save": modules_to_save})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update={"lora": lora})})


def _explain_task(adapter_task: task.Task) -> str:
    if adapter_task == "RewardModel":
        return "is the adapter of a reward model: set objective.type RewardModel"
    return "is the adapter of a language model, without a score head to continue: set model.adapter Merge"


def _find_unsupported_fields(config: Any) -> list[str]:
    """Return the fields of an adapter's configuration that method.lora cannot represent."""
    import peft

    defaults = peft.LoraConfig()
    unsupported_fields = [
        field.name
        for field in fields(config)
        if field.name not in _SUPPORTED_FIELDS
        and getattr(config, field.name) != getattr(defaults, field.name, None)
    ]
    if not config.target_modules:
        unsupported_fields.append("no target_modules")
    elif not isinstance(config.target_modules, list | set):
        unsupported_fields.append("target_modules that are a pattern")
    if config.init_lora_weights not in INITIALIZATIONS_KEEPING_BASE:
        unsupported_fields.append("init_lora_weights")
    if config.lora_alpha != int(config.lora_alpha):
        unsupported_fields.append("lora_alpha")
    return unsupported_fields


def match_weights(model: nn.Module, adapter: Path, recipe: Recipe) -> dict[str, tuple[nn.Parameter, Any]]:
    """Return the trained parameters of the model by their names in the adapter's file, each with the slice that has its values.

    Raises:
        RecipeRefusedError: the file is missing, or its weights do not fit the model.
        SafetensorError, OSError: the file cannot be read.
    """
    from safetensors import safe_open

    path = adapter / _WEIGHTS_FILE
    if not path.exists():
        raise _refusal(recipe, f"has no {_WEIGHTS_FILE}: save it with safe_serialization")
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    matches: dict[str, tuple[nn.Parameter, Any]] = {}
    # NB: a file has both names of a tied weight.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            stored_name = _stored_name(name)
            values = slices.get(stored_name)
            if values is None or list(values.get_shape()) != list(parameter.shape):
                raise _refusal(
                    recipe, f"does not fit its base: {stored_name} is missing or has a different shape"
                )
            matches[stored_name] = (parameter, values)
    unmatched_names = sorted(slices.keys() - matches.keys())
    if unmatched_names:
        raise _refusal(recipe, f"does not fit its base, which has no {unmatched_names[0]}")
    return matches


def _stored_name(name: str) -> str:
    """Return the name of a parameter in the files that peft writes, for example q_proj.lora_A.weight for q_proj.lora_A.default.weight."""
    name = name.replace("_checkpoint_wrapped_module.", "").replace(".modules_to_save.default", "")
    return name.replace(".default", "").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _refusal(recipe: Recipe, problem: str) -> RecipeRefusedError:
    return RecipeRefusedError(f"model.base {recipe.model.base} {problem}", reason="ModelNotLoadable")
