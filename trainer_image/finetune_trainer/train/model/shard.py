"""How a network is spread over the ranks, what it recomputes, and what it compiles."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model.network import Network, decoder_layers

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World


def mesh(strategy: str, world: World) -> DeviceMesh:
    """The ranks as replicas times shards.

    FSDP shards over all of them, HSDP over those of a pod, and with DDP each holds everything.
    """
    kind = world.device.type
    if strategy == "FSDP":
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shards = world.local_size if strategy == "HSDP" else 1
    return init_device_mesh(kind, (world.size // shards, shards), mesh_dim_names=("replicate", "shard"))


def shard(network: Network, over: DeviceMesh, precision: str, *, replicate_frozen: bool = False) -> Network:
    """Shard a network, a decoder layer at a time.

    Parameters stay in the type they have, gradients are reduced in fp32; with precision BF16 layers compute in bf16.
    Gradients are summed over the ranks, not averaged: the loop divides the loss by the global count.

    Args:
        network: the network, also on the meta device.
        over: from `mesh`.
        precision: BF16 or FP32.
        replicate_frozen: keep what is not trained as it is on each rank: four-bit weights cannot be sharded.
    """
    compute = torch.bfloat16 if precision == "BF16" else torch.float32
    # NB: by default FSDP2 casts what a forward pass gets, also the fp32 tensors inside dataclasses: a batch's reference
    # log-probabilities would be rounded to bf16. Hidden states have the type of the embedding, which is cast.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    ignored = (
        {weight for weight in network.parameters() if not weight.requires_grad} if replicate_frozen else None
    )
    for layer in decoder_layers(network):
        fully_shard(layer, mesh=over, mp_policy=policy, ignored_params=ignored)
    # NB: the embedding and the output layer may be one tensor, and the loss takes the output layer in chunks: both
    # stay in the root's group, which is whole from the beginning of the forward pass to the end of the backward.
    fully_shard(network, mesh=over, mp_policy=policy, ignored_params=ignored, reshard_after_forward=False)
    for module in sharded(network):
        module.set_gradient_divide_factor(1.0)
        # NB: over gloo, averaging silently sums (pytorch#162338), and scaled sums do not exist.
        module.set_force_sum_reduction_for_comms(True)
    return network


def sharded(network: nn.Module) -> list[FSDPModule]:
    """The modules that are sharded, each with a group of parameters of its own."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def recompute_activations(model: Any, kind: str, *, compiled: bool = False) -> None:
    """Make each decoder layer compute again in the backward pass what it did not keep.

    Full keeps a layer's input alone; Selective also keeps what is dear to compute: attention, and every other matrix
    product (as torchtitan does). Random draws are repeated, so dropout drops the same. In compiled layers the
    compiler chooses what is cheapest to compute again, until half is left.
    """
    if kind == "None":
        return
    if kind == "Selective" and compiled:
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = 0.5
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kind == "Selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_save_expensive_operations())
    model.activation_checkpointing_enable(options)


def _save_expensive_operations() -> Any:
    """A policy for one layer's pass; it counts, so that forward and recomputation decide alike."""
    from torch.utils.checkpoint import CheckpointPolicy

    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    attention = {
        getattr(torch.ops.aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
    }
    if hasattr(torch.ops, "torch_attn") and hasattr(torch.ops.torch_attn, "_varlen_attn"):
        attention.add(torch.ops.torch_attn._varlen_attn.default)  # noqa: SLF001 - how torch names it
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in attention:
            return CheckpointPolicy.MUST_SAVE
        if operation in products:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def compile_layers(network: Network) -> None:
    """Compile each decoder layer by itself: they are alike, so one compilation serves all.

    It is the forward pass alone that is compiled, after sharding: the hooks which gather and free weights stay
    outside.

    Raises:
        RecipeRefusedError: there is no compiler in the image.
    """
    if not any(shutil.which(name) for name in ("cc", "gcc", "c++", "g++", "clang")):
        raise RecipeRefusedError(
            "training.compile needs a C++ compiler, and the image has none: set it to false, or trainer.image to one "
            "that has g++"
        )
    for layer in decoder_layers(network):
        layer.forward = torch.compile(layer.forward)


def only_last_reduces(network: nn.Module, *, last: bool) -> None:
    """Between the passes of one step, leave out the all-reduce between replicas: gradients add up in the shards."""
    for module in sharded(network):
        module.set_requires_all_reduce(last)
