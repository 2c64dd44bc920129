"""Activation checkpointing: selects what a decoder layer saves, and verifies that its gradients do not change."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from finetune_trainer.pod.exit_status import RecipeRefusedError, first_line
from finetune_trainer.train.model.checks import probe
from finetune_trainer.train.model.network.trained_network import Network, base_of, decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_trainer.train.runtime.distributed import World

    Gradients = dict[str, torch.Tensor]
    """The gradients of a layer's input and of the layer's trained weights, by name."""

# A gradient may differ by this multiple of the difference between two equal runs, and by this many rounding errors of its type.
_NOISE_FACTOR, _ROUNDING_ERRORS = 10.0, 4.0
# A gradient below this share of the layer's gradient may consist only of rounding errors, for example at the bias of keys.
_MIN_GRADIENT_SHARE = 1e-3
# Numbers of a gradient that are compared at a time.
_MAX_NUMBERS_PER_PIECE = 2**24
_MAX_ERROR_CHARS = 150
_REASON = "RecomputationUnsupported"


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    requested: the activation checkpointing that was checked.
    kind: the activation checkpointing to use.
    key: what the result depends on, from `probe.compute_key`.
    """

    requested: Recomputation
    kind: Recomputation
    key: str

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Verdict | None:
        """Return the verdict in a checkpoint; None: the checkpoint has no verdict with all fields."""
        names = [field.name for field in fields(cls)]
        if stored is None or not all(name in stored for name in names):
            return None
        return cls(**{name: stored[name] for name in names})

    def matches(self, kind: Recomputation, key: str) -> bool:
        """Whether this is the result of `verify` for an activation checkpointing and a key."""
        return (self.requested, self.key) == (kind, key)


def is_supported(model: nn.Module) -> bool:
    """Whether transformers can recompute the layers of a model."""
    return bool(base_of(model).supports_gradient_checkpointing)


def check_supported(model: nn.Module, recipe: Recipe) -> None:
    """Check that a model supports the activation checkpointing of a recipe; Auto requires no support.

    Raises:
        RecipeRefusedError: the model does not support the activation checkpointing.
    """
    kind = recipe.training.activation_checkpointing
    if kind not in ("None", "Auto") and not is_supported(model):
        raise RecipeRefusedError(
            f"training.activationCheckpointing {kind} is not supported by {recipe.model.base}, because transformers "
            f"cannot recompute the layers of a {base_of(model).config.model_type}: set training.activationCheckpointing to None",
            reason=_REASON,
        )


def enable(model: nn.Module, kind: Recomputation, *, compiled: bool = False) -> None:
    """Enable activation checkpointing for each decoder layer.

    Full saves only the input of a layer. Selective also saves the outputs that `_SavePolicy` selects. The RNG state is restored, so
    that dropout repeats. In compiled layers, Selective is the compiler's memory budget of 0.5, halfway from Full (0) to None (1).
    """
    if kind == "None":
        return
    if _uses_memory_budget(kind, compiled=compiled):
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = 0.5
        return
    wrapped: Any = model
    wrapped.activation_checkpointing_enable(_checkpoint_options(model, kind))


def should_verify(kind: Recomputation, recipe: Recipe) -> bool:
    """Whether `verify` must compare gradients; not if the compiler chooses what to save, because it recognizes in-place operations."""
    return kind != "None" and not _uses_memory_budget(kind, compiled=recipe.training.compile)


def _uses_memory_budget(kind: Recomputation, *, compiled: bool) -> bool:
    return kind == "Selective" and compiled


def _checkpoint_options(model: nn.Module, kind: Recomputation) -> dict[str, Any]:
    """Return the arguments of `torch.utils.checkpoint.checkpoint`."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kind == "Selective":
        attention, products = _find_saved_operations(model)
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_SavePolicy(attention, products))
    return options


class _SavePolicy:
    """The policy of one layer in one forward pass: save the outputs of attention, and of every second product, as torchtitan does.

    NB: `products` has none whose output a model changes in place. torch notices such a change only if the output is not reshaped; after
    a reshape, the backward pass would compute with the changed output.
    """

    def __init__(self, attention: set[Any], products: set[Any]) -> None:
        self._attention = attention
        self._products = products
        self._count = 0

    def __call__(self, _context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in self._attention:
            return CheckpointPolicy.MUST_SAVE
        if operation in self._products:
            self._count += 1
            if self._count % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _find_saved_operations(model: nn.Module) -> tuple[set[Any], set[Any]]:
    """Return the operations of attention and the products whose outputs are saved.

    NB: not `bmm`, because Gemma 3n and the eager attention of some models add to its output in place; nor the product of experts with
    biases, because transformers adds the biases in place.
    """
    attention = _get_operations(
        "aten",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ) | _get_operations("torch_attn", "_varlen_attn")
    products = _get_operations("aten", "mm", "addmm") | _get_operations("bitsandbytes", "gemm_4bit")
    # All classes of fused experts in transformers have the attribute `has_bias`.
    if not any(getattr(module, "has_bias", False) for module in model.modules()):
        products |= _get_operations("aten", "_grouped_mm")
    return attention, products


def _get_operations(library: str, *names: str) -> set[Any]:
    """Return the operations of a library that are registered at this time."""
    operations = getattr(torch.ops, library)
    return {getattr(operations, name).default for name in names if hasattr(operations, name)}


def verify(network: Network, kind: Recomputation, recipe: Recipe, world: World, key: str) -> Verdict:
    """Return the activation checkpointing to use: `kind`, or Full if `kind` changes the gradients.

    Compares one layer of each class in the network, with its weights and its input for a few tokens, on all ranks together. The
    tolerance is a multiple of the difference between two equal runs without recomputation, and some rounding errors.

    Args:
        network: sharded, with its weights, before its layers are compiled.
        kind: Selective or Full.
        recipe: names the model in errors.
        world: the ranks.
        key: what the result depends on, from `probe.compute_key`.

    Raises:
        RecipeRefusedError: the gradients of Full differ too.
    """
    calls = _capture_calls(network, world.device)
    candidates: tuple[Recomputation, ...] = (kind, "Full") if kind != "Full" else (kind,)
    for candidate in candidates:
        difference = _find_difference(network, calls, candidate, world)
        if difference is None:
            return Verdict(requested=kind, kind=candidate, key=key)
        world.say(
            f"activation checkpointing {candidate} would change the gradients of {recipe.model.base}: {difference}"
        )
    raise RecipeRefusedError(
        f"{recipe.model.base} is a {network.base.config.model_type}, whose gradients change when its layers are recomputed "
        f"({difference}): set training.activationCheckpointing to None",
        reason=_REASON,
    )


@dataclass(frozen=True)
class _Call:
    """The arguments with which the model calls a layer: the hidden states, and other arguments."""

    name: str
    """The layer in messages, for example layer 3."""
    layer: nn.Module
    hidden: torch.Tensor
    forward: Callable[[torch.Tensor], Any]
    """The forward pass of the layer as a function of its hidden states. NB: without the hooks of FSDP, so that no gradient is reduced."""


def _capture_calls(network: Network, device: torch.device) -> list[_Call]:
    """Run a forward pass, and return the call of the first layer of each class."""
    document, *_ = probe.build_documents(network.head.vocabulary)
    batch = probe.build_batch([document], [[0]], device)
    first_layers: dict[tuple[Any, ...], tuple[int, nn.Module]] = {}
    for layer_number, decoder_layer in enumerate(decoder_layers(network)):
        first_layers.setdefault(_list_module_types(decoder_layer), (layer_number, decoder_layer))
    calls: list[_Call] = []

    def capture(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The hidden states are the first argument by position, or else the first floating-point tensor among the arguments by name.
        float_names = (
            name for name, value in kwargs.items() if torch.is_tensor(value) and value.is_floating_point()
        )
        hidden_name = next(float_names, None)
        if args:
            hidden, forward = args[0], lambda states: layer.forward(states, *args[1:], **kwargs)
        elif hidden_name is not None:
            hidden, forward = (
                kwargs[hidden_name],
                lambda states: layer.forward(**{**kwargs, hidden_name: states}),
            )
        else:
            # Without hidden states among the arguments, the layer cannot be compared.
            return
        # NB: models change hidden states in place.
        calls.append(_Call(f"layer {number}", layer, hidden.detach().clone(), forward))

    hooks = [
        layer.register_forward_pre_hook(partial(capture, number), with_kwargs=True)
        for number, layer in first_layers.values()
    ]
    try:
        # The hooks record the calls, so the losses need not be computed.
        with network.no_grad_forward(lambda _network, _batch, hidden: (hidden, hidden)):
            network(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _list_module_types(layer: nn.Module) -> tuple[Any, ...]:
    """Return the names and types of the modules of a layer, which identify its class."""
    return tuple((name, type(module)) for name, module in layer.named_modules())


def _find_difference(
    network: Network, calls: Sequence[_Call], kind: Recomputation, world: World
) -> str | None:
    """Describe the first gradient that recomputation changes on any rank; None: no gradient changes."""
    differences: list[str | None] = []
    for call in calls:
        with _prepare_layer(call.layer):
            differences.append(_compare_layer(call, world.device, _checkpoint_options(network.model, kind)))
    gathered = world.gather(differences)
    return next(
        (difference for rank_differences in gathered for difference in rank_differences if difference), None
    )


def _compare_layer(call: _Call, device: torch.device, options: Mapping[str, Any]) -> str | None:
    """Describe the first gradient of a layer that recomputation changes; None: no gradient changes.

    NB: only two sets of gradients exist at a time, on the device, which has room for them before the optimizer has states.
    On the host, the gradients of all ranks of a pod would require more than status.plan.hostMemory.
    """
    plain = _compute_gradients(call, device)
    noise = _measure_distances(plain, _compute_gradients(call, device))
    try:
        recomputed = _compute_gradients(call, device, **options)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # RuntimeErrors of the device, not of the recomputation.
        raise
    except RuntimeError as error:
        return f"{call.name} fails with {first_line(error)[:_MAX_ERROR_CHARS]}"
    return _describe_difference(call.name, plain, noise, recomputed)


@contextmanager
def _prepare_layer(layer: nn.Module) -> Iterator[None]:
    """Gather a layer, and let it compute in training mode without its own recomputation."""
    checkpointed_modules: list[Any] = [
        module for module in layer.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    if isinstance(layer, FSDPModule):
        layer.unshard()
    for module in checkpointed_modules:
        module.gradient_checkpointing = False
    layer.train()
    try:
        yield
    finally:
        layer.eval()
        for module in checkpointed_modules:
            module.gradient_checkpointing = True
        if isinstance(layer, FSDPModule):
            layer.reshard()


def _compute_gradients(call: _Call, device: torch.device, **options: Any) -> Gradients:
    """Return the gradients of a layer, on the device.

    Args:
        call: of the layer.
        device: where it computes.
        options: of `torch.utils.checkpoint.checkpoint`; without options nothing is recomputed.
    """
    hidden = call.hidden.clone().requires_grad_()
    weights = {name: weight for name, weight in call.layer.named_parameters() if weight.requires_grad}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        # NB: a model may change hidden states in place, which torch does not allow for a leaf.
        inputs = hidden.clone()
        output = checkpoint(call.forward, inputs, **options) if options else call.forward(inputs)
        states = output if isinstance(output, torch.Tensor) else output[0]
        # Not all ones: the sum of a normalized vector has no gradient.
        output_gradient = (
            torch.linspace(0, 100, states.numel(), device=device).sin().view_as(states).to(states.dtype)
        )
        # A weight may have no gradient: that of an expert that gets no token.
        gradients = torch.autograd.grad(
            states, [hidden, *weights.values()], output_gradient, allow_unused=True
        )
    return {
        name: gradient
        for name, gradient in zip(["the input", *weights], gradients, strict=True)
        if gradient is not None
    }


def _measure_distances(plain: Gradients, again: Gradients) -> dict[str, float]:
    """Return the norm of the difference of each gradient between two runs."""
    return {name: _distance(again[name], gradient) for name, gradient in plain.items()}


def _describe_difference(
    layer: str, plain: Gradients, noise: Mapping[str, float], recomputed: Gradients
) -> str | None:
    """Describe the first gradient that recomputation changes by more than noise; None: no gradient does.

    Args:
        layer: its name.
        plain: the gradients without recomputation.
        noise: the distance of each gradient from the same gradient in an equal run.
        recomputed: the gradients with recomputation.
    """
    layer_norm = math.hypot(*(_norm(gradient) for gradient in plain.values()))
    for name, gradient in plain.items():
        if not math.isfinite(noise[name]):
            # The gradient overflows in FP16, where training skips the step: there is nothing to compare.
            continue
        magnitude = _norm(gradient) + _MIN_GRADIENT_SHARE * layer_norm
        rounding = _ROUNDING_ERRORS * torch.finfo(gradient.dtype).eps * magnitude
        # A gradient that recomputation does not compute differs by its whole magnitude.
        distance = _distance(recomputed[name], gradient) if name in recomputed else magnitude
        # NB: `not <=`, because a NaN distance is a difference too.
        if not distance <= _NOISE_FACTOR * noise[name] + rounding:
            return f"the gradient of {name} in {layer} differs by {distance / magnitude:.1%}"
    return None


def _norm(values: torch.Tensor) -> float:
    return math.hypot(*(float(piece.float().norm()) for piece in _split(values)))


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    pieces = zip(_split(first), _split(second), strict=True)
    return math.hypot(*(_norm(first_piece - second_piece) for first_piece, second_piece in pieces))


def _split(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of parts of a tensor, so small that their copies in fp32 need little memory."""
    values = torch.atleast_1d(values)
    rows = max(1, _MAX_NUMBERS_PER_PIECE * len(values) // max(1, values.numel()))
    pieces: Sequence[torch.Tensor] = values.split(rows)
    return pieces
