"""`spec.training.optimizer`: the optimizer and its parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from finetune_crds.base import ApiModel, rules

DEFAULT_MOMENTUM = 0.95
# An explicit default is the same setting as an absent field.
_NONE_FOR_MOMENTUM = AfterValidator(lambda value: None if value == DEFAULT_MOMENTUM else value)


class Optimizer(ApiModel):
    """The optimizer, and its parameters besides learningRate and weightDecay."""

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
    """AdamW (arXiv:1711.05101), AdamW8bit with 8-bit moments (arXiv:2110.02861), or Muon (arXiv:2502.16982), which
    requires method.type Full. Muon is for the matrices of the layers, with AdamW for other weights."""
    weights: Literal["FP32", "BF16"] = "FP32"
    """Precision of trained weights and their gradients; BF16 requires method.type Full and precision BF16. With BF16,
    updates are rounded stochastically."""
    momentum: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, _NONE_FOR_MOMENTUM] = None
    """Muon: decay per step of the running mean of gradients. Default: 0.95."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay per step of the running mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW: decay per step of the running mean of squared gradients. Lower it, such as to 0.95, if large gradients occur
    now and then."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """AdamW: number that is added to the denominator of an update. Small gradients then give small updates."""
