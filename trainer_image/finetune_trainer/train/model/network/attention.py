"""Variable-length attention: each document of a packed row attends only to itself, without a mask."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers import PreTrainedModel

    from finetune_trainer.train.runtime.device import Card

# Two names of one attention: in a loop over the documents on CPUs, and as one kernel on GPUs.
NAME, NAME_ON_GPU = "isolated", "isolated_on_gpu"
NAMES = (NAME, NAME_ON_GPU)
# Values in a config's `layer_types` of layers whose tokens interact only through attention.
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Models that build their mask without position ids, so that it ignores documents (transformers 5.23).
_MODELS_MASKING_WITHOUT_POSITIONS = {"afmoe", "gpt_oss", "opt"}
# Models whose layers do not pass the decoder's arguments to their attention (transformers 5.23): Nemotron drops all of them, PhiMoE
# the sliding window; Doge adds its own mask.
_MODELS_WITH_OTHER_ARGUMENTS = {"doge", "nemotron", "phimoe"}


def register(*, gpu: bool = False) -> str:
    """Register `isolated_attention` with transformers, and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, isolated_attention)
    AttentionInterface.register(NAME_ON_GPU, partial(isolated_attention, gpu=True))
    return NAME_ON_GPU if gpu else NAME


def isolate(model: PreTrainedModel, *, card: Card | None, half: bool, soft_prompt: bool) -> bool:
    """Select `isolated_attention` if it computes the same as the model's own attention; return whether it is selected.

    Other models keep their attention, with the block-diagonal mask that transformers derives from the position ids.

    Args:
        model: the model, also on the meta device.
        card: the GPU that the model runs on, or is planned for; None for a CPU. The kernel of GPUs has no dropout.
        half: whether the model computes in bf16 or fp16, the only types of the variable-length kernels on GPUs.
        soft_prompt: whether virtual tokens precede the documents; in isolation, documents would not attend to them.
    """
    config = model.config.get_text_config()
    unsupported_options = ["attn_logit_softcapping", "attn_temperature_tuning"]
    if card:
        # NB: the kernel of GPUs requires values as wide as keys.
        unsupported_options.append("v_head_dim")
    # NB: models with attention sinks, and those that always have soft caps, do not support SDPA. Of other models, some can be configured to
    # have soft caps.
    is_plain = model._supports_sdpa and not any(getattr(config, name, None) for name in unsupported_options)  # noqa: SLF001
    is_isolated = (
        is_plain
        and not soft_prompt
        and _has_attention_alone(model)
        and config.model_type not in _MODELS_WITH_OTHER_ARGUMENTS
    )
    if is_isolated and card is not None:
        is_isolated = half and _is_kernel_supported(card, model) and not has_attention_dropout(model)
    if is_isolated:
        model.set_attn_implementation(register(gpu=card is not None))
    return is_isolated


def can_mask_documents(model: PreTrainedModel) -> bool:
    """Whether the model's own attention keeps the documents of a row apart."""
    return _has_attention_alone(model) and model.config.model_type not in _MODELS_MASKING_WITHOUT_POSITIONS


@contextmanager
def use_eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute with its eager attention, the reference implementation; older model classes keep their only attention."""
    from transformers import PreTrainedModel

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts if part._can_set_attn_implementation()}  # noqa: SLF001
    # NB: set_attn_implementation would give a model's vision tower the attention of its text too.
    implementations = [(config, config._attn_implementation) for config in configs.values()]  # noqa: SLF001
    for config, _ in implementations:
        config._attn_implementation_internal = "eager"  # noqa: SLF001
    try:
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation_internal = implementation  # noqa: SLF001


def _has_attention_alone(model: PreTrainedModel) -> bool:
    """Whether tokens interact only through transformers' attention interface, not through recurrent layers."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    other_layer_types = layer_types - _ATTENTION_LAYER_TYPES
    is_recurrent = getattr(model, "_is_stateful", False) or bool(other_layer_types)
    return bool(model._supports_attention_backend) and not is_recurrent  # noqa: SLF001


def _is_kernel_supported(card: Card, model: PreTrainedModel) -> bool:
    """Whether the kernel supports this GPU and the head sizes of the model: multiples of 8, at most 256 (flash-attention 2)."""
    is_recent = card.capability >= (8, 0)
    return is_recent and all(size <= 256 and size % 8 == 0 for size in _find_head_sizes(model))


def _find_head_sizes(model: PreTrainedModel) -> set[int]:
    """Return the sizes of the heads, which may differ between layers."""
    sizes = {
        size
        for layer in _attention_layers(model)
        if isinstance(size := getattr(layer, "head_dim", None), int)
    }
    config = model.config.get_text_config()
    return sizes or {config.hidden_size // config.num_attention_heads}


def has_attention_dropout(model: nn.Module) -> bool:
    """Whether the model drops out attention weights in training, under any name in its config."""
    for layer in _attention_layers(model):
        for name, value in {**vars(layer), **dict(layer.named_children())}.items():
            # `attention_dropout`, `attn_dropout`; `dropout` in OPT. Others, for example `resid_dropout`, apply to the output of attention.
            if name == "dropout" or ("drop" in name and "att" in name):
                share = value.p if isinstance(value, _DropoutNd) else value
                if isinstance(share, float) and share > 0:
                    return True
    return False


def _attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Return the attention layers: transformers has `Attention` in the names of their classes."""
    return (module for module in model.modules() if "Attention" in type(module).__name__)


def isolated_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    gpu: bool = False,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document.

    Args:
        module: the attention layer, which has the number of query heads per key head.
        query: [rows, heads, length, size].
        key: [rows, key heads, length, size].
        value: like key.
        attention_mask: None; `cu_seqlens` replaces it.
        scaling: of the scores.
        dropout: probability of attention dropout.
        sliding_window: tokens that a token attends to, itself included; None: no limit.
        cu_seqlens: where each document begins in the flattened rows, int32 [documents + 1].
        max_seqlen: tokens in the longest document.
        gpu: whether to use the kernel of GPUs; without a GPU, a memory plan calls it on fake tensors.

    Returns:
        [rows, length, heads, size], and None: attention weights are not computed.
    """
    assert attention_mask is None  # noqa: S101 - transformers builds no mask for a custom attention
    rows, heads, length, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    groups = getattr(module, "num_key_value_groups", 1)
    if gpu:
        out = _attend_on_gpu(flat, groups, cu_seqlens, max_seqlen, scaling=scaling, window=sliding_window)
    else:
        options = {"scale": scaling, "dropout_p": dropout, "enable_gqa": groups > 1}
        out = _attend_on_cpu(flat, cu_seqlens, sliding_window, options)
    return out.view(rows, length, heads, -1), None


def _attend_on_gpu(
    states: list[torch.Tensor],
    groups: int,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output [tokens, heads, size]; `states` are query, key and value, each [tokens, heads, size] over all rows."""
    query, key, value = states
    # Tokens before and after a token; -1: all.
    window_size = (-1 if window is None else window - 1, 0)
    out: torch.Tensor = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scaling,
        window_size=window_size,
        enable_gqa=groups > 1,
    )
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_on_cpu(
    states: list[torch.Tensor], cu_seqlens: torch.Tensor, window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    """Return the same as `_attend_on_gpu`, one document after the other."""
    # Batches for compiled layers end in empty documents.
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = []
    for document in zip(*(each.split(lengths) for each in states), strict=True):
        # [1, heads, tokens, size]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in document)
        tokens = query.shape[2]
        mask = _build_window_mask(tokens, window) if window is not None and tokens > window else None
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, **options
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _build_window_mask(tokens: int, window: int) -> torch.Tensor:
    """Return the mask of a causal sliding window, bool [tokens, tokens]."""
    positions = torch.arange(tokens)
    distances = positions[:, None] - positions[None, :]
    return (distances >= 0) & (distances < window)
