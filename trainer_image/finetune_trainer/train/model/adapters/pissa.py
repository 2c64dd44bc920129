"""PiSSA: low-rank layers that begin as the principal part of the weight that they adapt (Meng et al., arXiv:2404.02948).

With W = U S V^T and the rank r of the layers (method.lora.rank), A and B begin as A0 = sqrt(S_r / scaling) V_r^T and
B0 = U_r sqrt(S_r / scaling), as in peft, and the frozen weight becomes W - scaling B0 A0. A0 and B0 are kept with A and B, sharded alike,
and are part of each checkpoint: a resumed attempt subtracts the same product as the first attempt, and the export is an adapter of the
original base with twice the rank.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model import rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from finetune_trainer.train.runtime.distributed import World

# The buffer of a low-rank layer that keeps its initial weight.
_INITIAL = "initial"
# The name that peft gives an adapter.
_ADAPTER = "default"
# An exact decomposition takes twenty times as long (docs/design/speed.md) and is not needed: the model starts equal to its base
# whatever the split. Each iteration multiplies the error by (s[2 r + 1] / s[r]) squared, where s are the singular values, and 2 r is the
# size of the subspace: _OVERSAMPLING times r.
_OVERSAMPLING, _ITERATIONS = 2, 16
_SEED = 0


def enable(adapted: nn.Module) -> None:
    """Mark the low-rank layers of a model for PiSSA; the other functions ignore unmarked layers."""
    for module in adapted.modules():
        for name in ("lora_A", "lora_B"):
            for low_rank in getattr(module, name, {}).values():
                low_rank.register_buffer(_INITIAL, None)


def count_initial_numbers(model: nn.Module) -> int:
    """Count the numbers of the initial weights on all ranks together, also before `allocate_initial`."""
    return sum(
        low_rank.weight.numel() for layer in _find_layers(model) for low_rank in _low_rank_layers(layer)
    )


def is_initial(name: str) -> bool:
    """Whether a name in the state of a model is the name of an initial weight."""
    return name.endswith(f".{_INITIAL}")


def check(model: nn.Module) -> None:
    """Check that the adapted weights of a model, also on the meta device, can be split.

    Raises:
        RecipeRefusedError: two layers share a weight, or a weight has fewer singular values than method.lora.rank.
    """
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for layer in _find_layers(model):
        weight, lora_rank = layer.get_base_layer().weight, layer.r[_ADAPTER]
        # The name in the adapted layer first.
        layer_name, *shared_names = sorted(names[id(weight)], key=lambda name: "base_layer" not in name)
        if shared_names:
            raise RecipeRefusedError(
                f"method.lora.init PiSSA changes the weight of {_shorten(layer_name)}, which "
                f"{_shorten(shared_names[0])} shares: remove {_shorten(layer_name)} from method.lora.targetModules"
            )
        if lora_rank > min(weight.shape):
            raise RecipeRefusedError(
                f"method.lora.init PiSSA needs {lora_rank} singular values (method.lora.rank), but {_shorten(layer_name)} has only "
                f"{min(weight.shape)}: lower the rank, or remove the layer from method.lora.targetModules"
            )


def allocate_initial(model: nn.Module) -> None:
    """Allocate the initial weights of the low-rank layers, sharded or not."""
    for layer in _find_layers(model):
        for low_rank in _low_rank_layers(layer):
            low_rank.initial = torch.empty_like(low_rank.weight, requires_grad=False)


def split_weights(model: nn.Module, world: World, resume: Callable[[nn.Module], None] | None = None) -> None:
    """Split the adapted weights of a sharded model: the low-rank layers take the principal part, and the rest stays frozen.

    Each of n ranks decomposes every n-th weight. The number of ranks changes the result only as far as it changes the
    rounding of a matrix product.

    Args:
        model: after `allocate_initial`, with all weights.
        world: the ranks.
        resume: loads the initial weights of a previous attempt, which replace the decomposition.
    """
    start_seconds, layers = time.monotonic(), _find_layers(model)
    if not layers:
        return
    if resume is None:
        for begin in range(0, len(layers), world.size):
            _decompose(layers[begin : begin + world.size], world)
    else:
        resume(model)
    for layer in layers:
        for low_rank in _low_rank_layers(layer):
            rows.set_rows(low_rank.weight, rows.gather_tensor(low_rank.initial))
        _subtract_principal_part(layer)
    source = "by their singular values" if resume is None else "as in the checkpoint"
    world.say(f"PiSSA: {len(layers)} weights are split {source} ({time.monotonic() - start_seconds:.1f} s)")


def convert_to_lora(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of an adapter of the original base: A' = [A; A0], B' = [B, -B0], so that B' A' = B A - B0 A0.

    Doubles rank and alpha in the configuration of the adapter. With the scale alpha / sqrt(r), peft multiplies alpha by sqrt(2)
    instead, but `model.adapter: Continue` requires an integer alpha, so here B' is divided by sqrt(2).

    Args:
        model: a model adapted by peft.
        state: its unsharded weights by name; returned unchanged without PiSSA.
    """
    initial_names = {name for name in state if is_initial(name)}
    if not initial_names:
        return state
    config = model.peft_config[_ADAPTER]
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
    divisor = math.sqrt(2) if config.use_rslora else 1.0
    adapter_weights = {name: weight for name, weight in state.items() if name not in initial_names}
    for name in initial_names:
        weight_name = f"{name.removesuffix(_INITIAL)}weight"
        if ".lora_A." in name:
            adapter_weights[weight_name] = torch.cat([state[weight_name], state[name]])
        else:
            adapter_weights[weight_name] = torch.cat([state[weight_name], -state[name]], dim=1) / divisor
    return adapter_weights


def _find_layers(model: nn.Module) -> list[Any]:
    """Return the layers adapted by peft that use PiSSA."""
    layers = [module for module in model.modules() if _ADAPTER in getattr(module, "lora_A", ())]
    return [layer for layer in layers if hasattr(layer.lora_A[_ADAPTER], _INITIAL)]


def _low_rank_layers(layer: Any) -> tuple[Any, Any]:
    """Return the linear layers A and B."""
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


def _decompose(layers: list[Any], world: World) -> None:
    """Decompose one weight on each rank, and set the initial weights of all their low-rank layers."""
    own_weight: torch.Tensor | None = None
    for rank, layer in enumerate(layers):
        # NB: a collective call of all ranks; only one rank keeps the weight.
        weight = rows.gather_tensor(layer.get_base_layer().weight.detach())
        if rank == world.rank:
            own_weight = weight.t() if layer.fan_in_fan_out else weight
        del weight
    # NB: in `agree`, a decomposition may take longer than the timeout of collectives.
    factors = world.agree(
        lambda: _compute_factors(own_weight, layers[world.rank]) if own_weight is not None else None
    )
    for rank, layer in enumerate(layers):
        for index, low_rank in enumerate(_low_rank_layers(layer)):
            initial_weight = torch.empty(low_rank.weight.shape, device=world.device)
            if factors is not None and rank == world.rank:
                initial_weight.copy_(factors[index])
            dist.broadcast(initial_weight, src=rank)
            rows.set_rows(low_rank.initial, initial_weight)


def _compute_factors(weight: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A0 [r, inputs] and B0 [outputs, r] of a weight [outputs, inputs], fp32."""
    left_vectors, singular_values, right_vectors = compute_truncated_svd(weight.float(), layer.r[_ADAPTER])
    root = (singular_values / layer.scaling[_ADAPTER]).sqrt()
    return root[:, None] * right_vectors.t(), left_vectors * root


def compute_truncated_svd(
    weight: torch.Tensor, lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first singular vectors and values of a weight [m, n], by iterations on a random subspace with a fixed seed.

    Returns:
        [m, lora_rank], [lora_rank] and [n, lora_rank].
    """
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), torch.no_grad():
        torch.manual_seed(_SEED)
        subspace_size = min(_OVERSAMPLING * lora_rank, *weight.shape)
        left_vectors, singular_values, right_vectors = torch.svd_lowrank(
            weight, subspace_size, niter=_ITERATIONS
        )
    return left_vectors[:, :lora_rank], singular_values[:lora_rank], right_vectors[:, :lora_rank]


def _subtract_principal_part(layer: Any) -> None:
    """Subtract the principal part from this rank's rows of the frozen weight.

    In fp64, and rounded once: the result does not depend on the order of sums, which depends on the rows of a rank.
    """
    low_rank_a, low_rank_b = _low_rank_layers(layer)
    initial_a = rows.gather_tensor(low_rank_a.initial).double()
    initial_b = rows.gather_tensor(low_rank_b.initial).double()
    left, right = initial_b, initial_a
    if layer.fan_in_fan_out:
        # The weight is stored transposed: (B0 A0)^T = A0^T B0^T.
        left, right = initial_a.t(), initial_b.t()
    local_weight, local_slice = rows.local_rows(layer.get_base_layer().weight)
    with torch.no_grad():
        local_weight.copy_(local_weight.double() - layer.scaling[_ADAPTER] * (left[local_slice] @ right))


def _shorten(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
