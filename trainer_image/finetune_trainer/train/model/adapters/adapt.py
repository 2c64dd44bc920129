"""Applies a method to a model: full fine-tuning, adapters, or virtual tokens."""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_crds.training import SOFT_PROMPT_METHODS, Lora, SoftPrompt
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.adapters import pissa
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens, embedding_and_head_names
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import find_towers, is_linear, trained_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_crds.training import Method

# Standard deviation of a new prefix: small compared with the model's own keys.
_PREFIX_STANDARD_DEVIATION = 0.02
# The values of method.lora.bias, and their names in peft.
_PEFT_BIASES = {None: "none", "All": "all", "LoraOnly": "lora_only"}


def adapt(model: PreTrainedModel, method: Method, base: str, new_tokens: NewTokens = NO_TOKENS) -> nn.Module:
    """Add the parameters of the method to the model, and freeze the others, except the rows of new tokens.

    `compute_initial_value` returns the values of new parameters later: the model may be on the meta device.

    Trained parameters are fp32, except with method Full, which changes nothing here.

    Args:
        model: the base model.
        method: the recipe's method.
        base: the address of the base in the recipe, for the configuration of the adapter.
        new_tokens: the tokens that are added to the vocabulary.

    Raises:
        RecipeRefusedError: method.lora names layers that the model does not have, or that cannot be trained.
    """
    if method.type == "Full":
        return model
    import peft

    if method.type in SOFT_PROMPT_METHODS:
        prompt = method.soft_prompt or SoftPrompt()
        kind = peft.PrefixTuningConfig if method.type == "PrefixTuning" else peft.PromptTuningConfig
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=prompt.virtual_tokens)
    else:
        config = _build_lora_config(model, method, new_tokens)
    end_names = embedding_and_head_names(model)
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise RecipeRefusedError(_explain_peft_error(method, str(error))) from error
    _check_has_biases(adapted, method)
    if method.lora is not None and method.lora.init == "PiSSA":
        pissa.enable(adapted)
    if getattr(config, "ensure_weight_tying", False):
        _check_still_tied(adapted, end_names)
    for weight in trained_parameters(adapted):
        # NB: changed in place, because a new parameter would no longer be tied.
        weight.data = weight.data.float()
    # An adapter is loaded with its base: record the base's name from the recipe, not its folder in this pod.
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def _explain_peft_error(method: Method, error: str) -> str:
    """Say what to change if peft cannot adapt a model."""
    if "ParamWrapper" not in error:
        return f"peft cannot adapt the model with method {method.type}: {error}"
    # For experts that a model stores in one tensor, peft has a separate class, ParamWrapper, which supports less.
    change = "set method.type to LoRA" if method.type == "DoRA" else "set method.lora.dropout to 0"
    return (
        f"method.lora.targetModules includes the model's experts, which peft can adapt only with LoRA and no dropout: {change}, "
        "or list only attention layers"
    )


def _build_lora_config(model: PreTrainedModel, method: Method, new_tokens: NewTokens) -> Any:
    import peft
    from peft.utils.constants import EMBEDDING_LAYER_NAMES
    from transformers.pytorch_utils import Conv1D

    lora = method.lora or Lora()
    tower_names = find_towers(model)
    _check_targets(model, lora.target_modules, tower_names)
    modules_to_save = _resolve_modules_to_save(model, method)
    # The ends of a model: its embedding and its output layer.
    ends = embedding_and_head_names(model)
    if new_tokens.ids:
        _check_targets_with_new_tokens(lora.target_modules, ends)
    head = model.get_output_embeddings()
    tied = head is not None and model.get_input_embeddings().weight is head.weight
    trained_ends = [end for end in ends if any(_does_name_match(name, end) for name in modules_to_save)]
    if tied:
        # NB: peft keeps the ends tied only if modules_to_save has a name that it recognizes, for example lm_head, but not GPT-2's wte.
        recognized_ends = [end for end in ends if end.rsplit(".", 1)[-1] in EMBEDDING_LAYER_NAMES]
        is_recognized_listed = any(end in trained_ends for end in recognized_ends)
        if trained_ends and recognized_ends and not is_recognized_listed:
            modules_to_save.append(recognized_ends[-1])
        # peft applies the settings of the embedding to the tied output layer.
        ends = ends[:1]
        trained_ends = ends if trained_ends else []
    frozen_ends = [end for end in ends if end not in trained_ends]
    if new_tokens.ids:
        _check_head_bias_with_new_tokens(model, frozen_ends)
    new_ids_by_layer = {end: list(new_tokens.ids) for end in frozen_ends} if new_tokens.ids else {}
    return peft.LoraConfig(
        task_type=task.PEFT_TASKS[task.of_model(model)],
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or "all-linear",
        # NB: adapters of towers, which process no text (`find_towers`), would get no gradient. peft matches a string, as a pattern, against
        # whole names.
        exclude_modules="|".join(rf"{re.escape(name)}(\..+)?" for name in tower_names) or None,
        use_rslora=lora.scaling == "RankStabilized",
        use_dora=method.type == "DoRA",
        bias=_PEFT_BIASES[lora.bias],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        modules_to_save=modules_to_save or None,
        ensure_weight_tying=tied and bool(trained_ends),
        trainable_token_indices=new_ids_by_layer or None,
    )


def _check_targets(model: PreTrainedModel, targets: list[str], tower_names: list[str]) -> None:
    """Check that each of targetModules matches a linear layer that processes text."""
    linear = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and not _is_within(name, tower_names)
    ]
    for target in targets:
        if target == task.SCORE and task.of_model(model) == "RewardModel":
            raise RecipeRefusedError(
                f"method.lora.targetModules {target} is the score head, which is always trained in full: remove it from the list"
            )
        if not any(_does_name_match(target, name) for name in linear):
            layer_names = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise RecipeRefusedError(
                f"method.lora.targetModules {target} is not a linear layer of the model: its linear layers are {', '.join(layer_names)}"
            )


def _check_targets_with_new_tokens(targets: list[str], ends: list[str]) -> None:
    for target in targets:
        if any(_does_name_match(target, end) for end in ends):
            raise RecipeRefusedError(
                f"method.lora.targetModules {target} is the output layer, which gets rows for model.newTokens: list it in "
                "method.lora.modulesToSave instead"
            )


def _check_head_bias_with_new_tokens(model: PreTrainedModel, extended_ends: list[str]) -> None:
    """Check that the output layer has no bias if it gets rows for new tokens: peft adds rows to the weight, but no entries to the bias."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is None:
        return
    extended_ids = {id(model.get_submodule(name).weight) for name in extended_ends}
    if id(head.weight) in extended_ids:
        name = next(name for name, module in model.named_modules() if module is head)
        raise RecipeRefusedError(
            f"model.newTokens cannot be trained while {name} is frozen, because its bias gets no entries for them: add {name} to "
            "method.lora.modulesToSave, or set method.type Full"
        )


def _resolve_modules_to_save(model: PreTrainedModel, method: Method) -> list[str]:
    """Return the layers of modulesToSave as peft matches them: by the end of a name."""
    tower_names, head = find_towers(model), task.get_output_layer(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if not list(module.children()) and list(module.parameters())
    }
    layers_outside_towers = [layer for layer in layers if not _is_within(layer, tower_names)]
    names: list[str] = []
    requested = (method.lora or Lora()).modules_to_save
    if task.of_model(model) == "RewardModel":
        # peft adds the score head itself, and lists it in adapters whose training continues.
        requested = [name for name in requested if name not in task.HEAD_NAMES]
    for name in requested:
        matching_layers = [layer for layer in layers_outside_towers if _does_name_match(name, layer)]
        if not matching_layers:
            layer_names = sorted({layer.rsplit(".", 1)[-1] for layer in layers_outside_towers})
            raise RecipeRefusedError(
                f"method.lora.modulesToSave {name} is not a layer of the model: its layers are {', '.join(layer_names)}"
            )
        # QLoRA quantizes all linear layers except the output layer.
        linear_layers = [layers[layer] for layer in matching_layers if is_linear(layers[layer])]
        if method.type == "QLoRA" and any(layer is not head for layer in linear_layers):
            raise RecipeRefusedError(
                f"method.lora.modulesToSave {name} is quantized to 4 bits by method QLoRA and cannot be trained: remove {name} from the "
                "list, or set method.type LoRA"
            )
        # NB: peft also matches `norm` with `q_norm`, and layers in towers: then the full names are listed.
        suffix_matches = [layer for layer in layers if layer.endswith(name)]
        names += matching_layers if len(suffix_matches) > len(matching_layers) else [name]
    return names


def _is_within(layer: str, modules: list[str]) -> bool:
    """Whether a layer is in a list of modules, or inside a module of the list."""
    return any(layer == name or layer.startswith(f"{name}.") for name in modules)


def _does_name_match(name: str, layer: str) -> bool:
    """Whether a name in a recipe matches a layer: it is the layer's full name, or the last parts of the full name."""
    return layer == name or layer.endswith(f".{name}")


def _check_still_tied(adapted: Any, ends: list[str]) -> None:
    """Check that an embedding and an output layer that share a weight still share it if they are in modulesToSave."""
    base = adapted.get_base_model()
    wrapped = [
        getattr(end, "modules_to_save", {})
        for end in (base.get_input_embeddings(), base.get_output_embeddings())
    ]
    # None: a layer that is not in modulesToSave.
    weight_ids = {id(each["default"].weight) if "default" in each else None for each in wrapped}
    if None in weight_ids or len(weight_ids) > 1:
        raise RecipeRefusedError(
            f"method.lora.modulesToSave lists only one of {' and '.join(ends)}, which share a weight, and peft cannot train the weight "
            "for both: remove the listed layer from method.lora.modulesToSave, or set method.type Full"
        )


def _check_has_biases(adapted: nn.Module, method: Method) -> None:
    bias = (method.lora or Lora()).bias
    if bias is not None and not any(
        weight.requires_grad and "bias" in name for name, weight in adapted.named_parameters()
    ):
        scope = "the model has" if bias == "All" else "the adapted layers have"
        raise RecipeRefusedError(
            f"method.lora.bias {bias} trains biases, but {scope} no biases: remove method.lora.bias"
        )


def compute_initial_value(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the initial value of a parameter that the method adds, fp32; it does not depend on the number of ranks.

    LoRA's A is uniform in +-1/sqrt(inputs), as in peft (He et al. with a = sqrt(5)). B is zero, so that the adapted
    model starts equal to its base. Other parameters, such as a prefix, are normal.

    Args:
        name: the parameter's name in the model.
        shape: its unsharded shape.
        seed: the recipe's seed.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    # Seeds have 63 bits.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if ".lora_A." in name:
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(shape).normal_(0.0, _PREFIX_STANDARD_DEVIATION, generator=generator)


def choose_prompt_tokens(prompt: SoftPrompt, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
    """Return the tokens whose embeddings initialize prompt tuning, int64 [virtual tokens].

    The tokens of initText, repeated; without initText, a sample of the vocabulary, by the seed (Lester et al.,
    arXiv:2104.08691, section 3.2, find both better than random values).

    Raises:
        RecipeRefusedError: initText has no tokens.
    """
    if prompt.init_text:
        ids = tokenizer(prompt.init_text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RecipeRefusedError(
                f"method.softPrompt.initText {prompt.init_text!r:.40} has no tokens in the tokenizer of the model: write a text with words, or "
                "remove initText"
            )
        rounds = math.ceil(prompt.virtual_tokens / len(ids))
        return torch.tensor((ids * rounds)[: prompt.virtual_tokens])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(tokenizer), (prompt.virtual_tokens,), generator=generator)
