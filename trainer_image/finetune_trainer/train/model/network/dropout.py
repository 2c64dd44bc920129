"""Takes the dropout out of a base model, and what else is random in its forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.dropout import _DropoutNd

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers of layers, such as `attention_dropout`, `layerdrop`, `resid_pdrop`; and `jitter_noise` of what is sent to experts.
_RANDOM_FIELDS = ("drop", "jitter")
# Models that choose experts at random in training, by the same number that bounds the choice in evaluations.
_MODELS_WITH_RANDOM_ROUTERS = ("phimoe",)


def remove(model: PreTrainedModel, what: str = "model.base") -> None:
    """Set each probability of dropout in a model to 0, in training too, and noise of its routers; its config keeps what it says.

    Losses that compare answers are about differences of log-probabilities, and dropout differs between the two answers. References are
    computed without it: with it, the policy of DPO and KTO would not begin as its reference. The mode of the modules cannot say this, since
    their activation checkpointing depends on it.

    Args:
        model: of transformers, without an adapter, whose dropout is the recipe's.
        what: how errors name it.

    Raises:
        RecipeRefusedError: what is random in it cannot be taken out.
    """
    if model.config.model_type in _MODELS_WITH_RANDOM_ROUTERS:
        raise RecipeRefusedError(
            f"{what} is a {model.config.model_type}, which chooses experts at random while it is trained, so that its answers cannot "
            "be compared: choose another model, or objective SFT"
        )
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if any(part in name for part in _RANDOM_FIELDS) and isinstance(value, float):
                setattr(module, name, 0.0)
