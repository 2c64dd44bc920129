"""The model: fetched, loaded, adapted and sharded."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Method, Model, Training
    from finetune_trainer.train.distributed import World


@contextmanager
def _telling_what_is_wrong(model: Model) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise RecipeRefusedError(
            f"model.base {model.base} cannot be loaded: {first_line}", reason="ModelNotLoadable"
        ) from error


def load_model(recipe: Recipe, source: Path) -> PreTrainedModel:
    """The base model in fp32 on the host.

    Raises:
        RecipeRefusedError: it cannot be loaded, or its context is shorter than training.maxLength.
    """
    from transformers import AutoModelForCausalLM

    with _telling_what_is_wrong(recipe.model):
        model = AutoModelForCausalLM.from_pretrained(
            str(source),
            trust_remote_code=recipe.model.trust_remote_code,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and recipe.training.max_length > context:
        raise RecipeRefusedError(
            f"training.maxLength {recipe.training.max_length} is above the {context} tokens that model.base "
            f"{recipe.model.base} can take: lower it"
        )
    return model


def adapt(model: PreTrainedModel, method: Method, base: str, seed: int) -> nn.Module:
    """Put on the model what the method trains; the same seed gives the same adapter on every rank.

    Raises:
        RecipeRefusedError: method.lora.targetModules names a layer that the model does not have.
    """
    if method.type == "Full":
        return model
    import peft

    from finetune_crds.training import Lora

    lora = method.lora or Lora()
    _check_targets(model, lora.target_modules)
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.target_modules) or "all-linear",
            use_rslora=lora.use_rslora,
        ),
    )
    # The adapter is of no use without its base: name the one that people know, not a folder of this pod.
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def _check_targets(model: nn.Module, wanted: list[str]) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise RecipeRefusedError(
                f"method.lora.targetModules {target} is no linear layer of the model: it has {', '.join(known)}"
            )


def recompute_activations(model: nn.Module, training: Training) -> None:
    """Turn activation checkpointing on where the recipe asks for it."""
    if training.activation_checkpointing == "Full":
        model.activation_checkpointing_enable({"use_reentrant": False})


def shard(model: nn.Module, training: Training, world: World) -> nn.Module:
    """Shard the model over all ranks, a decoder layer at a time.

    Parameters are kept, and gradients reduced, in fp32; with precision BF16 layers compute in bf16. Gradients are
    summed over the ranks, not averaged: the loop divides the loss by the global count of targets.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    compute = torch.bfloat16 if training.precision == "BF16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    model.to(world.device)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # NB: the embedding and the output layer may be one tensor, so both stay in the root's group.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # NB: over gloo, averaging silently sums (pytorch#162338), and scaled sums do not exist.
            module.set_force_sum_reduction_for_comms(True)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: the longest list of modules in it."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW over what is trained; biases and norms do not decay."""
    decayed = [parameter for parameter in trained(model) if parameter.ndim > 1]
    others = [parameter for parameter in trained(model) if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=training.learning_rate)
