"""The pods of training: their number, their GPUs, and how the model is sharded over them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    ApiModel,
    LabelValue,
    NonNegative,
    Positive,
    ReplacedField,
    replaced,
    rules,
)


class Gpu(ApiModel):
    """Which GPUs the pods get."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.product) || self.resourceName.startsWith('nvidia.com/')",
                "product is a label of NVIDIA's GPU feature discovery: for other GPUs set pods.train.template.spec.nodeSelector",
                ".product",
            ),
        )
    )

    resource_name: Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = (
        "nvidia.com/gpu"
    )
    """Extended resource that the device plugin offers."""
    product: LabelValue | None = None
    """Value of the node label nvidia.com/gpu.product that the pods need, such as NVIDIA-H100-80GB-HBM3."""


class Distributed(ApiModel):
    """The pods of one training attempt, which start and restart together."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.gpusPerNode) || !has(self.processesPerNode) || self.processesPerNode <= self.gpusPerNode",
                "processesPerNode must not be above gpusPerNode, since each process needs its own GPU: lower or remove processesPerNode",
                ".processesPerNode",
            ),
            (
                "!has(self.gpu) || has(self.gpusPerNode)",
                "gpu can be set only when gpusPerNode is set",
                ".gpu",
            ),
            (
                "!has(self.gpusPerNode) || !has(self.device) || self.device != 'CPU'",
                "gpusPerNode must not be set when device is CPU",
                ".device",
            ),
        )
        | replaced(
            nccl=ReplacedField(
                "object", "distributed.nccl", "replaced by pods.train.env, a list of names and values"
            )
        )
    )

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of pods, one per node."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of each pod: sets the limit of the container and the number of ranks."""
    gpu: Gpu | None = None
    """Which GPUs. Default: nvidia.com/gpu of any product."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks in each pod. Default: gpusPerNode, or 1 without it."""
    device: Literal["GPU", "CPU"] | None = None
    """GPU fails the attempt if a pod has no GPU; CPU trains on CPUs, even if a pod has GPUs. Default: GPUs if a pod has
    any, else CPUs for a model of up to a billion parameters."""
    strategy: Literal["FSDP", "HSDP", "DDP"] = "FSDP"
    """FSDP shards over all ranks; HSDP shards in a node and replicates between nodes; DDP replicates.

    QLoRA: each rank holds the whole quantized base, and the strategy shards the adapters only.
    """
    network_interface: Annotated[str, Field(min_length=1, max_length=15)] | None = None
    """Interface for NCCL and gloo, such as eth0."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of the rendezvous on the first pod."""
    rendezvous_timeout_seconds: Positive = 600
    """How long the ranks wait for each other when an attempt starts."""
    collective_timeout_seconds: Positive = 1800
    """How long one collective may take before the attempt fails."""
    node_lost_seconds: NonNegative = 30
    """How long the pods of every step wait for a node that is not ready. Kubernetes notices after 40-50 s that a node
    is not ready."""

    @property
    def gpu_resource(self) -> str:
        """The extended resource of the GPUs."""
        return (self.gpu or Gpu()).resource_name

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each pod."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def ranks(self) -> int:
        """Ranks of an attempt, in all pods."""
        return self.nodes * self.ranks_per_node
