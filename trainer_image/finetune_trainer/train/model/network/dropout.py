"""Removes dropout and other randomness from the forward pass of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.dropout import _DropoutNd

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parts of the names of fields: `attention_dropout`, `layerdrop` or `resid_pdrop` of layers, and `jitter_noise` of the inputs of experts.
_RANDOM_FIELDS = ("drop", "jitter")
# Models that choose experts at random in training, by a parameter that cannot be set to 0, because evaluations use it too.
_MODELS_WITH_RANDOM_ROUTERS = ("phimoe",)


def remove(model: PreTrainedModel, what: str = "model.base") -> None:
    """Set the dropout probabilities and the router noise of a model to 0, in training too; its config is not changed.

    Losses that compare answers depend on differences of log-probabilities, and dropout differs between the two answers. References are
    computed without dropout, so with dropout the policy of DPO and KTO would not start equal to its reference. Evaluation mode cannot
    replace this, since activation checkpointing depends on training mode.

    Args:
        model: a model of transformers without an adapter: an adapter's dropout is set by the recipe.
        what: the model, for the error message.

    Raises:
        RecipeRefusedError: the randomness cannot be removed.
    """
    if model.config.model_type in _MODELS_WITH_RANDOM_ROUTERS:
        raise RecipeRefusedError(
            f"{what} is a {model.config.model_type}, which routes tokens to random experts in training, so its answers cannot "
            "be compared: choose another model, or objective SFT"
        )
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if any(part in name for part in _RANDOM_FIELDS) and isinstance(value, float):
                setattr(module, name, 0.0)
