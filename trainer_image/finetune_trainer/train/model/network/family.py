"""Checks by its config whether a model belongs to a family that can be trained."""

from __future__ import annotations

from typing import Any

from finetune_trainer.pod.exit_status import RecipeRefusedError


def check_causal(config: Any, what: str) -> None:
    """Refuse models that are not causal language models, before their weights are fetched.

    NB: transformers builds a causal language model from an encoder without an error, and each token then attends to the tokens that it
    predicts.

    Args:
        config: of transformers.
        what: the model, for the error message.

    Raises:
        RecipeRefusedError: the model is an encoder, an encoder-decoder model, or has no language model in transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # If the model's own code defines a causal language model, transformers' classes do not count.
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder model"
    # Encoders whose layers can also be decoders have both `add_cross_attention` and `is_decoder`. GPT-NeoX, a decoder, has an unused
    # `add_cross_attention`, but no `is_decoder`: without it, a model counts as a decoder.
    elif hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        kind = "an encoder (is_decoder is false in its config.json)"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "a model type without a causal language model in this version of transformers"
    else:
        return
    raise RecipeRefusedError(
        f"{what} is a {config.model_type}, {kind}: choose a causal language model", reason="ModelNotSupported"
    )
