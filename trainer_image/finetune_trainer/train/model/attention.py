"""Attention inside documents: packed rows are never multiplied with each other's tokens, not even to be masked."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

NAME = "isolated"
# Kinds of layers, as configurations name them, in which a token sees others by attention alone.
_ATTENDING = {"full_attention", "sliding_attention"}
# Models that make their mask without the position ids (transformers 5.23), so that it knows no documents.
_MASK_WITHOUT_POSITIONS = {"afmoe", "gpt_oss", "opt"}


def register() -> str:
    """Make `isolated_attention` known to transformers, and return the name that models select it by."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, isolated_attention)
    return NAME


def isolate(model: PreTrainedModel, *, cuda: bool, half: bool, soft_prompt: bool) -> bool:
    """Give a model `isolated_attention` where that computes the same as the model's own, and tell whether it does.

    Otherwise the model keeps its own, under a mask of blocks that transformers derives from the position ids.

    Args:
        model: the model, also on the meta device.
        cuda: whether it runs on a GPU.
        half: whether it computes in bf16, the only type for which GPUs have variable-length kernels.
        soft_prompt: whether virtual tokens stand before the documents, which isolation would hide.
    """
    config = model.config.get_text_config()
    odd = ("attn_logit_softcapping", "attn_temperature_tuning", "v_head_dim" if cuda else "")
    # NB: sinks and soft caps are what keeps a model from plain SDPA, and it is how models tell of them.
    plain = model._supports_sdpa and not any(getattr(config, name, None) for name in odd)  # noqa: SLF001
    kernel = not cuda or (half and _gpu_can(config))
    chosen = plain and kernel and not soft_prompt and _attends_alone(model)
    if chosen:
        model.set_attn_implementation(register())
    return chosen


def masks_documents(model: PreTrainedModel) -> bool:
    """Whether documents can share a row under the attention of the model's own."""
    return _attends_alone(model) and model.config.model_type not in _MASK_WITHOUT_POSITIONS


def _attends_alone(model: PreTrainedModel) -> bool:
    """Whether tokens see each other by the library's attention alone, and not by recurrent layers."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    recurrent = getattr(model, "_is_stateful", False) or not kinds <= _ATTENDING
    return bool(model._supports_attention_backend) and not recurrent  # noqa: SLF001


@cache
def varlen_attention() -> Any:
    """Torch's variable-length flash attention; None where this version of torch cannot do it with a causal window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


@cache
def _groups_heads() -> bool:
    """Whether the kernel takes fewer heads of keys than of queries (torch 2.12 and later)."""
    return "enable_gqa" in inspect.signature(varlen_attention()).parameters


def _gpu_can(config: Any) -> bool:
    """Whether the kernel runs on this GPU and for this model: it drops nothing and knows heads of 256 at most."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    recent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    drops = bool(getattr(config, "attention_dropout", None))
    return varlen_attention() is not None and recent and head <= 256 and not drops


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
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each document with itself.

    Args:
        module: the layer's attention, which knows how many query heads share a key.
        query: [rows, heads, length, size].
        key: [rows, key heads, length, size].
        value: like key.
        attention_mask: None; `cu_seqlens` replaces it.
        scaling: factor of the scores.
        dropout: probability with which a weight is dropped.
        sliding_window: how many tokens back a token sees, itself included.
        cu_seqlens: where each document begins in the flattened rows, int32 [documents + 1].
        max_seqlen: tokens in the longest document.

    Returns:
        [rows, length, heads, size], and None for the weights, which are never made.
    """
    assert attention_mask is None  # noqa: S101 - transformers makes none for an attention it does not know
    rows, heads, length, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    groups = getattr(module, "num_key_value_groups", 1)
    if query.is_cuda:
        out = _on_gpu(flat, groups, cu_seqlens, max_seqlen, scaling=scaling, window=sliding_window)
    else:
        options = {"scale": scaling, "dropout_p": dropout, "enable_gqa": groups > 1}
        out = _on_cpu(flat, cu_seqlens, sliding_window, options)
    return out.view(rows, length, heads, -1), None


def _on_gpu(
    states: list[torch.Tensor],
    groups: int,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    query, key, value = states
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 and _groups_heads() else {}
    if groups > 1 and not options:
        key, value = (shared.repeat_interleave(groups, dim=1) for shared in (key, value))
    reach = (-1 if window is None else window - 1, 0)
    out: torch.Tensor = varlen_attention()(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scaling,
        window_size=reach,
        **options,
    )
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _on_cpu(
    states: list[torch.Tensor], cu_seqlens: torch.Tensor, window: int | None, options: dict[str, Any]
) -> torch.Tensor:
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = []
    for document in zip(*(each.split(lengths) for each in states), strict=True):
        # [1, heads, tokens, size]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in document)
        tokens = query.shape[2]
        mask = _window_mask(tokens, window) if window is not None and tokens > window else None
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, **options
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _window_mask(tokens: int, window: int) -> torch.Tensor:
    """Which tokens each token of a document sees, bool [tokens, tokens]."""
    positions = torch.arange(tokens)
    back = positions[:, None] - positions[None, :]
    return (back >= 0) & (back < window)
