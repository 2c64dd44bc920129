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

_WEIGHTS = "adapter_model.safetensors"
# What a method says too, and what says nothing about the layers.
_KNOWN = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "task_type",
        "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "megatron_core",
        "loftq_config", "runtime_config", "bias", "modules_to_save", "ensure_weight_tying",
    }
)  # fmt: skip
# Initial values that leave the weights of the base as they are; others have changed them.
INITIAL = (True, False, "gaussian")
# Those of peft, by the fields of a method.
_BIASES: dict[str, Literal["All", "LoraOnly"]] = {"all": "All", "lora_only": "LoraOnly"}


def with_parameters(recipe: Recipe, adapter: Path) -> Recipe:
    """The recipe with the parameters of the adapter in folder `adapter` as method.lora.

    Raises:
        RecipeRefusedError: it is no adapter of the method, or has what cannot be trained here.
    """
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _refused(recipe, f"has a configuration that cannot be read: {error}") from error
    if not isinstance(config, peft.LoraConfig):
        raise _refused(recipe, f"is a {getattr(config.peft_type, 'value', config.peft_type)} adapter")
    if config.use_dora != (recipe.method.type == "DoRA"):
        other = "DoRA" if config.use_dora else "LoRA or QLoRA"
        raise _refused(recipe, f"is not an adapter of method {recipe.method.type}: set method.type {other}")
    more = _more(config)
    if more:
        raise _refused(
            recipe, f"has {', '.join(more)}, which cannot be trained here: set model.adapter Merge"
        )
    targets, whole = sorted(config.target_modules or ()), sorted(config.modules_to_save or ())
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
        raise _refused(
            recipe, f"has what method.lora.{where} cannot hold, {what}: set model.adapter Merge"
        ) from error
    # NB: not validated: a name of a recipe may stand for one in each layer, and an adapter has all of them.
    lora = lora.model_copy(update={"target_modules": targets, "modules_to_save": whole})
    return recipe.model_copy(update={"method": recipe.method.model_copy(update={"lora": lora})})


def _more(config: Any) -> list[str]:
    """The fields of an adapter's configuration that a method does not know."""
    import peft

    usual = peft.LoraConfig()
    found = [
        field.name
        for field in fields(config)
        if field.name not in _KNOWN and getattr(config, field.name) != getattr(usual, field.name, None)
    ]
    named = isinstance(config.target_modules, list | set) and config.target_modules
    found += [] if named else ["target_modules that are a pattern"]
    found += [] if config.init_lora_weights in INITIAL else ["init_lora_weights"]
    return found + ([] if config.lora_alpha == int(config.lora_alpha) else ["lora_alpha"])


def weights(model: nn.Module, adapter: Path, recipe: Recipe) -> dict[str, tuple[nn.Parameter, Any]]:
    """The parameters of an adapter in the model, each with the slice of the file that has its values, by their names there.

    Raises:
        RecipeRefusedError: the file is missing, or has other weights.
        SafetensorError, OSError: it cannot be read.
    """
    from safetensors import safe_open

    path = adapter / _WEIGHTS
    if not path.exists():
        raise _refused(recipe, f"has no {_WEIGHTS}: save it with safe_serialization")
    with safe_open(path, framework="pt") as file:
        there = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    found: dict[str, tuple[nn.Parameter, Any]] = {}
    # NB: a file has both names of a tied weight.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            # As peft names them in files.
            stored = name.replace("_checkpoint_wrapped_module.", "").replace(".modules_to_save.default", "")
            stored = stored.replace(".default", "")
            stored = stored.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
            values = there.get(stored)
            if values is None or list(values.get_shape()) != list(parameter.shape):
                raise _refused(recipe, f"does not fit its base: {stored} is missing, or has another shape")
            found[stored] = (parameter, values)
    more = sorted(there.keys() - found.keys())
    if more:
        raise _refused(recipe, f"does not fit its base, which has no {more[0]}")
    return found


def _refused(recipe: Recipe, what: str) -> RecipeRefusedError:
    return RecipeRefusedError(f"model.base {recipe.model.base} {what}", reason="ModelNotLoadable")
