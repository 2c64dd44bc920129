"""An adapter that is trained further: its parameters as those of the method, and its weights."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from finetune_crds.base import first_mistake
from finetune_crds.training import Lora
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from finetune_crds.recipe import Recipe

_WEIGHTS_FILE = "adapter_model.safetensors"
# What a method says too, and what says nothing about the layers.
_SUPPORTED_FIELDS = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "task_type",
        "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "megatron_core",
        "loftq_config", "runtime_config", "bias", "modules_to_save", "ensure_weight_tying",
    }
)  # fmt: skip
# Initial values that leave the weights of the base as they are; others have changed them.
INITIALIZATIONS_KEEPING_BASE = (True, False, "gaussian")
# Those of peft, by the fields of a method.
_BIASES: dict[str, Literal["All", "LoraOnly"]] = {"all": "All", "lora_only": "LoraOnly"}


def apply_adapter_config(recipe: Recipe, adapter: Path) -> Recipe:
    """The recipe with the parameters of the adapter in folder `adapter` as method.lora.

    Raises:
        RecipeRefusedError: it is no adapter of the method, or has what cannot be trained here.
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
    unsupported_fields = _find_unsupported_fields(config)
    if unsupported_fields:
        raise _refusal(
            recipe,
            f"has {', '.join(unsupported_fields)}, which cannot be trained here: set model.adapter Merge",
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
            recipe, f"has what method.lora.{where} cannot hold, {what}: set model.adapter Merge"
        ) from error
    # NB: not validated: a name of a recipe may stand for one in each layer, and an adapter has all of them.
    lora = lora.model_copy(update={"target_modules": target_modules, "modules_to_save": modules_to_save})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update={"lora": lora})})


def _find_unsupported_fields(config: Any) -> list[str]:
    """The fields of an adapter's configuration that a method does not know."""
    import peft

    defaults = peft.LoraConfig()
    unsupported_fields = [
        field.name
        for field in fields(config)
        if field.name not in _SUPPORTED_FIELDS
        and getattr(config, field.name) != getattr(defaults, field.name, None)
    ]
    has_module_names = isinstance(config.target_modules, list | set) and config.target_modules
    unsupported_fields += [] if has_module_names else ["target_modules that are a pattern"]
    unsupported_fields += (
        [] if config.init_lora_weights in INITIALIZATIONS_KEEPING_BASE else ["init_lora_weights"]
    )
    return unsupported_fields + ([] if config.lora_alpha == int(config.lora_alpha) else ["lora_alpha"])


def match_weights(model: nn.Module, adapter: Path, recipe: Recipe) -> dict[str, tuple[nn.Parameter, Any]]:
    """The parameters of an adapter in the model, each with the slice of the file that has its values, by their names there.

    Raises:
        RecipeRefusedError: the file is missing, or has other weights.
        SafetensorError, OSError: it cannot be read.
    """
    from safetensors import safe_open

    path = adapter / _WEIGHTS_FILE
    if not path.exists():
        raise _refusal(recipe, f"has no {_WEIGHTS_FILE}: save it with safe_serialization")
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    matches: dict[str, tuple[nn.Parameter, Any]] = {}
    # NB: a file has both names of a tied weight.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            stored_name = _stored_name(name)
            values = slices.get(stored_name)
            if values is None or list(values.get_shape()) != list(parameter.shape):
                raise _refusal(
                    recipe, f"does not fit its base: {stored_name} is missing, or has another shape"
                )
            matches[stored_name] = (parameter, values)
    unmatched_names = sorted(slices.keys() - matches.keys())
    if unmatched_names:
        raise _refusal(recipe, f"does not fit its base, which has no {unmatched_names[0]}")
    return matches


def _stored_name(name: str) -> str:
    """The name of a parameter in the files that peft writes."""
    name = name.replace("_checkpoint_wrapped_module.", "").replace(".modules_to_save.default", "")
    return name.replace(".default", "").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def _refusal(recipe: Recipe, problem: str) -> RecipeRefusedError:
    return RecipeRefusedError(f"model.base {recipe.model.base} {problem}", reason="ModelNotLoadable")
