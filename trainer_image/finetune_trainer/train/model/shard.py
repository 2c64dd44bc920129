"""Sharding and compilation of a network."""

from __future__ import annotations

import shutil
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.network.trained_network import Network, decoder_layers
from finetune_trainer.train.model.precision import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_trainer.train.runtime.distributed import World


def build_mesh(strategy: str, world: World, timeout_seconds: int | None = None) -> DeviceMesh:
    """Build the device mesh of the ranks, replicas times shards.

    FSDP shards over all ranks, HSDP over the ranks of a pod; with DDP every rank has all parameters. For example, the mesh of 8 ranks in
    pods of 4 is [8] with FSDP, [2, 4] with HSDP, and [8, 1] with DDP.

    Args:
        strategy: FSDP, HSDP or DDP.
        world: the ranks.
        timeout_seconds: of each collective with HSDP and DDP; None: torch's default. FSDP uses the process group and timeout of the world.
    """
    device_type = world.device.type
    if strategy == "FSDP":
        return init_device_mesh(device_type, (world.size,), mesh_dim_names=("shard",))
    shards = world.local_size if strategy == "HSDP" else 1
    mesh = init_device_mesh(
        device_type, (world.size // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    if timeout_seconds is not None:
        # NB: the groups of a mesh with two dimensions do not inherit the timeout of the world.
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=timeout_seconds), group)
    return mesh


def shard(network: Network, mesh: DeviceMesh, precision: str, *, replicate_frozen: bool = False) -> Network:
    """Shard a network: an FSDP group for each decoder layer, and, unless they are tied, for the embedding and for the output layer.

    An untied embedding is gathered only for its forward pass, and the output layer until its gradient is known, which is at the beginning of
    the backward pass. Parameters keep their dtype, gradients are reduced in fp32, and layers compute in `precision`.
    Gradients are summed over the ranks, not averaged: the loop divides the loss by the global count.

    Args:
        network: the network, also on the meta device.
        mesh: from `build_mesh`.
        precision: BF16, FP16 or FP32.
        replicate_frozen: keep frozen parameters unsharded on each rank: four-bit weights cannot be sharded.
            Where there is only one shard, frozen parameters in the dtype of the computation are never sharded.
    """
    # NB: by default FSDP2 casts forward inputs, also the fp32 tensors inside dataclasses: it would round a batch's
    # reference log-probabilities to bf16. Hidden states have the dtype of the embedding, which is cast.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    ignored_weights = {weight for weight in network.parameters() if not weight.requires_grad}
    if not replicate_frozen:
        # NB: on one shard, FSDP would copy these weights before each use, in each pass of each layer.
        has_one_shard = mesh.size(mesh.ndim - 1) == 1
        ignored_weights = {
            weight for weight in ignored_weights if has_one_shard and weight.dtype == policy.param_dtype
        }
    shard_group = partial(fully_shard, mesh=mesh, mp_policy=policy)
    layers = decoder_layers(network)
    for layer in layers:
        shard_group(layer, ignored_params=ignored_weights)
    if not network.tied:
        embedding: Any = network.base.get_input_embeddings()
        shard_group(embedding, ignored_params=ignored_weights)
        # NB: the gradient of the embedding needs only the tokens, so the backward pass need not gather the embedding again.
        embedding.set_unshard_in_backward(False)
        shard_group(network.head, ignored_params=ignored_weights, reshard_after_forward=False)
        _prefetch_head(network.head, layers)
        # The output layer is also a part of the model, where the root would shard it again.
        ignored_weights |= {*network.head.parameters()}
    # The root's group is small, for example the last norm, or has the tied embedding, which the loss needs. It stays gathered from
    # the start of the forward pass to the end of the backward pass.
    shard_group(network, ignored_params=ignored_weights, reshard_after_forward=False)
    for module in find_fsdp_modules(network):
        module.set_gradient_divide_factor(1.0)
        # NB: force plain sums: over gloo, averaging silently sums (pytorch#162338), and scaled sums do not exist.
        module.set_force_sum_reduction_for_comms(True)
    return network


def _prefetch_head(head: Any, layers: Sequence[Any]) -> None:
    """Gather the output layer while the last decoder layer computes.

    Otherwise the gather starts only when the CPU has launched that whole layer, which is too late if the GPU waits for the CPU. The gather
    is asynchronous, and so must be requested ahead. A synchronous gather would cost memory: FSDP keeps its buffer until the end of the
    forward pass, as a second copy of the output layer during the loss, when memory is at its peak.
    """
    head._set_unshard_async_op(True)  # noqa: SLF001 - there is no public way
    if layers:
        layers[-1].set_modules_to_forward_prefetch([head])


def find_fsdp_modules(network: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules of a network, the root included."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def compile_layers(network: Network, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each decoder layer separately: the layers are alike, so they share one compilation.

    Call this after sharding: only the forward pass is compiled, without FSDP's hooks that gather and free weights. Even if the
    embedding is frozen, its output requires a gradient, like the inputs of all later layers: otherwise the first layer would have
    separate graphs.

    Args:
        network: the network.
        backend: of torch.compile.

    Raises:
        RecipeRefusedError: the image has no C++ compiler.
    """
    if not any(shutil.which(name) for name in ("cc", "gcc", "c++", "g++", "clang")):
        raise RecipeRefusedError(
            "training.compile requires a C++ compiler, and the image does not have one: set training.compile to false, or set "
            "pods.train.image to an image with g++"
        )
    embedding = network.base.get_input_embeddings()
    if not any(weight.requires_grad for weight in embedding.parameters()):
        embedding.register_forward_hook(_require_gradient)
    for layer in decoder_layers(network):
        layer.forward = torch.compile(layer.forward, backend=backend)


def _require_gradient(_embedding: nn.Module, _ids: object, words: torch.Tensor) -> torch.Tensor:
    return words.requires_grad_() if torch.is_grad_enabled() else words


def set_replica_reduction(network: nn.Module, *, is_enabled: bool) -> None:
    """Enable or disable the all-reduce between replicas: only the last pass of a step needs it, gradients accumulate in the shards."""
    for module in find_fsdp_modules(network):
        module.set_requires_all_reduce(is_enabled)
