"""AdamW with less memory: moments in 8 bits, and bf16 weights with stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_trainer.train.model import seeds
from finetune_trainer.train.model.rows import local_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

# Sizes of a block, whose numbers share a scale; the largest size that divides a row is used.
_BLOCK_SIZES = (256, 128, 64)
# Smaller tensors keep fp32 moments, as in bitsandbytes and torchao.
_MIN_QUANTIZED_NUMBERS = 4096
# Numbers that are updated at once. About ten fp32 tensors of this size exist during an update.
_NUMBERS_PER_UPDATE = 4 * 2**20


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) that computes in fp32 and stores smaller states.

    The quantization is that of bitsandbytes: 8-bit codes, and an fp32 scale for each block of at most 256 numbers (Dettmers et al.,
    arXiv:2110.02861). A block never crosses rows: each rank holds whole blocks, so that a different
    number of ranks can read a checkpoint of 8-bit moments. The optimizer of bitsandbytes is not used, since it does not support sharded
    tensors, nor torchao's, which selects 8-bit moments by the size of a shard. Moments of vectors, of small tensors, of tensors whose rows
    are not a multiple of 64, and of embeddings are fp32.

    Weights in bf16 are rounded stochastically (arXiv:2010.06192): the nearer a neighbor, the more probable it is. Updates smaller than half
    the precision of bf16 are thus kept on average. All ranks that hold the same rows round them alike.

    Like the fused optimizers of torch, it reads the attribute `found_inf`, an fp32 scalar on the device: if it is not 0, the step
    changes nothing.

    Args:
        groups: parameter groups with `params` and `weight_decay`.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the denominator.
        eight_bit: whether moments have 8 bits.
        embeddings: weights whose moments are fp32 even if `eight_bit` is set.
        seed: seed of the rounding.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        eight_bit: bool,
        embeddings: Collection[torch.Tensor] = (),
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.number = 0
        """The number of the step, set before each step: rounding is a function of it."""
        self._eight_bit = eight_bit
        # NB: ids, because `==` of tensors compares their values.
        self._embeddings = {id(weight) for weight in embeddings}
        self._seed = seed
        self._code_values: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update each weight that has a gradient; never waits for the GPU."""
        assert closure is None  # noqa: S101 - the loop computes the gradients
        position = 0
        for group in self.param_groups:
            for weight in group["params"]:
                position += 1
                if weight.grad is not None:
                    with torch.no_grad():
                        self._update(weight, group, position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and keep the dtypes of its tensors."""
        # NB: torch would cast the state, even 8-bit codes, to the dtype of the weights, and hold both copies at once.
        super().load_state_dict({**state_dict, "state": {}})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        weights = (weight for group in self.param_groups for weight in group["params"])
        for key, weight in zip(keys, weights, strict=True):
            if key in state_dict["state"]:
                self.state[weight] = dict(state_dict["state"][key])

    def _update(self, weight: torch.Tensor, group: dict[str, Any], position: int) -> None:
        """Update a weight; its position among all weights is a part of the seed of its rounding."""
        state = self.state[weight]
        if not state:
            state.update(self._initialize_state(weight))
        local_weight, rows = local_rows(weight)
        local_gradient, _ = local_rows(weight.grad)
        # NB: packed experts have three dimensions, a matrix for each expert.
        values, gradients = _as_rows(local_weight), _as_rows(local_gradient)
        first_moment = self._find_moment(state, "exp_avg", values.device)
        second_moment = self._find_moment(state, "exp_avg_sq", values.device)
        beta1, beta2 = group["betas"]
        is_applied = is_step_finite(self, values.device)
        state["step"] += is_applied
        noise = None
        if values.dtype == torch.bfloat16:
            noise = torch.Generator(values.device)
            noise.manual_seed(seeds.derive(self._seed, self.number, position, rows.start or 0))
        for part in _iterate_parts(values):
            # NB: NaN must not reach the quantization, which looks up codes by value.
            gradient = torch.where(is_applied, gradients[part].float(), 0.0)
            mean = first_moment.read(part).lerp(gradient, 1 - beta1)
            square = second_moment.read(part).lerp(gradient.square_(), 1 - beta2)
            first_moment.write(part, mean, is_applied)
            second_moment.write(part, square, is_applied)
            updated = _compute_update(values[part].float(), mean, square, state["step"], group)
            if noise is not None:
                updated = round_stochastically(updated, noise)
            values[part] = torch.where(is_applied, updated, values[part])

    def _find_moment(self, state: dict[str, torch.Tensor], name: str, device: torch.device) -> _Moment:
        """Return this rank's rows of a moment, with the values of its codes on the device if it is quantized."""
        scales = state.get(f"{name}_scale")
        local_values, _ = local_rows(state[name])
        if scales is None:
            return _Moment(_as_rows(local_values), scales=None, code_values=None)
        local_scales, _ = local_rows(scales)
        # The second moment is a mean of squares, so its codes have no sign.
        signed = name == "exp_avg"
        if (device, signed) not in self._code_values:
            self._code_values[device, signed] = torch.tensor(
                compute_code_values(signed=signed), device=device
            )
        return _Moment(_as_rows(local_values), _as_rows(local_scales), self._code_values[device, signed])

    def _initialize_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a weight before its first update: moments in fp32, or 8-bit codes with their scales."""
        state = {"step": torch.zeros((), device=weight.device)}
        block = next((size for size in _BLOCK_SIZES if weight.shape[-1] % size == 0), 0)
        is_quantized = (
            self._eight_bit
            and id(weight) not in self._embeddings
            and block > 0
            and weight.ndim > 1
            and weight.numel() >= _MIN_QUANTIZED_NUMBERS
        )
        for name in ("exp_avg", "exp_avg_sq"):
            if is_quantized:
                scales_shape = (*weight.shape[:-1], weight.shape[-1] // block)
                # NB: the value of code 0 is not 0, but a number is the product of its code's value and its scale, which is 0 here.
                state[name] = _allocate_zeros(weight, weight.shape, torch.uint8)
                state[f"{name}_scale"] = _allocate_zeros(weight, scales_shape, torch.float32)
            else:
                state[name] = _allocate_zeros(weight, weight.shape, torch.float32)
        return state


@dataclass(frozen=True)
class _Moment:
    """This rank's rows of a moment.

    values: the moment in fp32; with scales, its 8-bit codes.
    scales: the scale of each block of codes, fp32 [rows, blocks]; None: the moment is not quantized.
    code_values: the value of each code, fp32 [256].
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    code_values: torch.Tensor | None

    def read(self, part: slice) -> torch.Tensor:
        if self.scales is None:
            return self.values[part]
        values: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            self.values[part], self.scales[part].flatten(), self.code_values, self._block, torch.float32
        )
        return values

    def write(self, part: slice, values: torch.Tensor, is_applied: torch.Tensor) -> None:
        """Write new values if the step is applied; otherwise keep the codes: quantizing them again would change them."""
        if self.scales is None:
            self.values[part] = torch.where(is_applied, values, self.values[part])
            return
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(values, self.code_values, self._block)
        self.values[part] = torch.where(is_applied, codes, self.values[part])
        previous_scales = self.scales[part]
        self.scales[part] = torch.where(is_applied, scales.view_as(previous_scales), previous_scales)

    @property
    def _block(self) -> int:
        assert self.scales is not None  # noqa: S101 - only codes have blocks
        row, blocks = int(self.values.shape[-1]), int(self.scales.shape[-1])
        return row // blocks


def _compute_update(
    weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Return rows of a weight after a step, in fp32. Overwrites `mean` and `square`."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    denominator = square.sqrt_().div_((1 - beta2**step).sqrt()).add_(group["eps"])
    update = mean.div_(1 - beta1**step).div_(denominator)
    return (weight * (1 - rate * group["weight_decay"])).sub_(update, alpha=rate)


def find_embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights of embeddings, including one that is shared with the output layer.

    Few rows of an embedding get a gradient in a step, and gradients differ in size, so the moments stay in fp32, as transformers keeps
    them with the AdamW8bit of bitsandbytes (transformers.Trainer.create_optimizer; arXiv:2110.02861, section 2.3).
    """
    weights = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]


def is_step_finite(optimizer: Any, device: torch.device) -> torch.Tensor:
    """Return whether a step is applied, a scalar on the device: the optimizer's `found_inf` is 0 or not set."""
    found_inf = getattr(optimizer, "found_inf", None)
    return torch.ones((), dtype=torch.bool, device=device) if found_inf is None else found_inf == 0


def round_stochastically(values: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Round fp32 values to the bf16 number below or above at random; the mean over many draws is the value."""
    random_bits = torch.randint(
        0, 1 << 16, values.shape, generator=noise, dtype=torch.int32, device=values.device
    )
    # bf16 is the upper half of fp32: a random addend carries into it with a probability proportional to the lower half, which is then
    # cleared.
    upper_half = -(1 << 16)
    return ((values.view(torch.int32) + random_bits) & upper_half).view(torch.float32).bfloat16()


def _allocate_zeros(like: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros that are sharded by rows like a weight."""
    local, _ = local_rows(like)
    zeros = torch.zeros((*local.shape[:1], *shape[1:]), dtype=dtype, device=local.device)
    if not isinstance(like, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def _as_rows(values: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with more than two dimensions as a matrix of its rows."""
    return values.view(-1, values.shape[-1]) if values.ndim > 2 else values


def _iterate_parts(values: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _NUMBERS_PER_UPDATE // max(1, values[:1].numel()))
    for begin in range(0, len(values), rows):
        yield slice(begin, begin + rows)


@cache
def compute_code_values(*, signed: bool) -> tuple[float, ...]:
    """Return the values of the 256 codes, ascending: from -1 to 1 if signed, otherwise from 0 to 1."""
    from bitsandbytes.functional import create_dynamic_map

    values: list[float] = create_dynamic_map(signed=signed).tolist()  # type: ignore[no-untyped-call]
    return tuple(values)
