"""Which optimizer applies the gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from finetune_crds.base import ApiModel, rules

DEFAULT_MOMENTUM = 0.95
# A default that is written out is not another setting.
_NONE_FOR_MOMENTUM = AfterValidator(lambda value: None if value == DEFAULT_MOMENTUM else value)


class Optimizer(ApiModel):
    """Which optimizer applies the gradients, and its parameters besides learningRate and weightDecay."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.momentum) || self.type == 'Muon'",
                "momentum can be set only when type is Muon",
                ".momentum",
            ),
            (
                "self.weights == 'FP32' || self.type != 'Muon'",
                "weights BF16 requires type AdamW or AdamW8bit",
                ".weights",
            ),
        )
    )

    type: Literal["AdamW", "AdamW8bit", "Muon"] = "AdamW"
    """AdamW (arXiv:1711.05101). AdamW8bit: with moments of 8 bits (arXiv:2110.02861). Muon (arXiv:2502.16982): for the matrices of
    the layers, with method Full; AdamW for the rest."""
    weights: Literal["FP32", "BF16"] = "FP32"
    """What trained weights and their gradients are kept in. BF16: updates are rounded stochastically. Needs method Full and
    precision: BF16."""
    momentum: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, _NONE_FOR_MOMENTUM] = None
    """Muon: decay of the mean of the gradients, each step. Default: 0.95."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the mean of the gradients, each step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW: decay of the mean of their squares, each step. Lower, such as 0.95, where large gradients come now and then."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """AdamW: what is added to the denominator of an update, so that small gradients give small updates."""
