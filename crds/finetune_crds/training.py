"""How the model is trained: method, objective, hyperparameters, sharding and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    A_SET,
    LATE,
    ApiModel,
    EnvMap,
    Fraction,
    LabelValue,
    LongText,
    Name,
    NonNegative,
    ObjectName,
    Positive,
    Uri,
    renamed,
    rules,
)
from finetune_crds.chat import ChatTemplate
from finetune_crds.env import RESERVED_LIST

MethodType = Literal["Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning", "PromptTuning"]
ObjectiveType = Literal["SFT", "DPO", "Distillation"]

# Methods that train low-rank adapters, and those that train virtual tokens; below as CEL lists.
LOW_RANK = ("LoRA", "QLoRA", "DoRA")
SOFT_PROMPTS = ("PrefixTuning", "PromptTuning")
_ADAPTERS = str([*LOW_RANK])
_SOFT_PROMPTS = str([*SOFT_PROMPTS])


class ModelCache(ApiModel):
    """A volume on which downloaded models are kept."""

    claim_name: ObjectName
    """PersistentVolumeClaim. The access mode is ReadWriteMany where a job has pods on several nodes."""


class Model(ApiModel):
    """The model to start from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.revision) || (!self.base.startsWith('/') && !self.base.contains(':'))",
                "revision applies to Hub models only: remove it where base is a path or a URI",
                ".revision",
            ),
        )
    )

    base: Uri
    """Hub id (org/name), absolute path on a volume, s3://bucket/folder, or models:/name@alias."""
    revision: Name | None = None
    """Git revision of a Hub model."""
    chat_template: ChatTemplate | None = None
    """What renders conversations. Default: the chat template of the model's tokenizer."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run in the pods."""
    cache: ModelCache | None = None
    """Where downloaded models are kept for later attempts and jobs. Default: every attempt downloads the model."""


class Lora(ApiModel):
    """Parameters of low-rank adapters."""

    model_config = ConfigDict(json_schema_extra=renamed(useRslora=("boolean", "scaling: RankStabilized")))

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Positive = 32
    """Scale of the update; see scaling."""
    dropout: Fraction = 0.0
    """Dropout before the adapter."""
    target_modules: Annotated[list[Name], Field(max_length=32, json_schema_extra=A_SET)] = Field(
        default_factory=list
    )
    """Names of the layers to adapt, such as q_proj. Default: every linear layer except the output."""
    scaling: Literal["Standard", "RankStabilized"] = "Standard"
    """Standard: the update is multiplied by alpha / rank. RankStabilized: by alpha / sqrt(rank) (arXiv:2312.03732)."""


class Quantization(ApiModel):
    """How QLoRA stores the frozen base model."""

    type: Literal["NF4", "FP4"] = "NF4"
    """Four-bit data type."""
    double_quantization: bool = True
    """Quantize the quantization constants too."""


class SoftPrompt(ApiModel):
    """Trained virtual tokens."""

    virtual_tokens: Annotated[int, Field(ge=1, le=1024)] = 20
    """Number of virtual tokens."""
    init_text: LongText | None = None
    """Text whose embeddings initialize the prompt (PromptTuning). Default: random embeddings."""


class Method(ApiModel):
    """Which parameters are trained."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (f"!has(self.lora) || self.type in {_ADAPTERS}", "lora needs type LoRA, QLoRA or DoRA", ".lora"),
            (
                "!has(self.quantization) || self.type == 'QLoRA'",
                "quantization needs type QLoRA",
                ".quantization",
            ),
            (
                f"!has(self.softPrompt) || self.type in {_SOFT_PROMPTS}",
                "softPrompt needs type PrefixTuning or PromptTuning",
                ".softPrompt",
            ),
            (
                f"!has(self.export) || self.export == 'Adapter' || self.type in {_ADAPTERS}",
                "export: Merged needs type LoRA, QLoRA or DoRA",
                ".export",
            ),
            (
                "!has(self.softPrompt) || !has(self.softPrompt.initText) || self.type == 'PromptTuning'",
                "softPrompt.initText needs type PromptTuning: PrefixTuning starts from random values",
                ".softPrompt.initText",
            ),
        )
        | renamed(merge=("boolean", "export: Merged"))
    )

    type: MethodType = "Full"
    """Full trains every parameter; the other types train a small addition to a frozen model."""
    lora: Lora | None = None
    """Parameters of LoRA, QLoRA and DoRA."""
    quantization: Quantization | None = None
    """Parameters of QLoRA."""
    soft_prompt: SoftPrompt | None = None
    """Parameters of PrefixTuning and PromptTuning."""
    export: Literal["Adapter", "Merged"] | None = None
    """What is registered: the adapter alone, or the model with the adapter merged into it. Default: Adapter, where the type trains
    one."""


class Dpo(ApiModel):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""


class Distillation(ApiModel):
    """Training on the probabilities of a teacher model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.teacherRevision) || (!self.teacher.startsWith('/') && !self.teacher.contains(':'))",
                "teacherRevision applies to Hub models only: remove it where teacher is a path or a URI",
                ".teacherRevision",
            ),
        )
    )

    teacher: Uri
    """The teacher, named like model.base: Hub id, path, s3://bucket/folder, or models:/name@alias."""
    teacher_revision: Name | None = None
    """Git revision of a teacher from the Hub."""
    teacher_trust_remote_code: bool = False
    """Allow code from the teacher's repository to run in the pods."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Temperature of both distributions."""
    weight: Fraction = 0.5
    """Share of the teacher in the loss. The rest is cross-entropy on the data."""


class Objective(ApiModel):
    """What the loss is."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.lossOn) || self.type == 'SFT'", "lossOn needs type SFT", ".lossOn"),
            ("!has(self.dpo) || self.type == 'DPO'", "dpo needs type DPO", ".dpo"),
            (
                "has(self.distillation) == (self.type == 'Distillation')",
                "distillation and type Distillation require each other",
            ),
        )
    )

    type: ObjectiveType = "SFT"
    """SFT: next-token loss. DPO: preferences. Distillation: a teacher."""
    loss_on: Literal["Answer", "All"] | None = None
    """Compute the loss on the answer only or on every token. Default: Answer where prompt and answer are known."""
    dpo: Dpo | None = None
    """Parameters of DPO."""
    distillation: Distillation | None = None
    """Parameters of Distillation."""


class EarlyStopping(ApiModel):
    """Stop when the evaluation loss no longer decreases."""

    patience: Positive = 3
    """Evaluations without improvement before stopping."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Minimum decrease of the evaluation loss that counts as an improvement."""


class Training(ApiModel):
    """Hyperparameters."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!(has(self.epochs) && has(self.maxSteps))", "set epochs or maxSteps, not both", ".maxSteps"),
            (
                "!(has(self.warmupSteps) && has(self.warmupRatio))",
                "set warmupSteps or warmupRatio, not both",
                ".warmupRatio",
            ),
            (
                "!has(self.earlyStopping) || has(self.evalEverySteps)",
                "earlyStopping needs evaluations during training: set training.evalEverySteps",
                ".earlyStopping",
            ),
            (
                "!has(self.select) || self.select == 'Last' || has(self.evalEverySteps)",
                "select: Best needs evaluations during training: set training.evalEverySteps",
                ".select",
            ),
        )
        | renamed(
            batchSize=("integer", "perDeviceBatchSize"),
            evalBatchSize=("integer", "perDeviceEvalBatchSize"),
            evalSteps=("integer", "evalEverySteps"),
            logSteps=("integer", "logEverySteps"),
            loadBest=("boolean", "select: Best"),
        )
    )

    epochs: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Passes over the training split. Default: 1, when maxSteps is not set either."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    per_device_batch_size: Positive = 4
    """Sequences per rank in one forward pass. With packing: packs of maxLength tokens."""
    per_device_eval_batch_size: Positive | None = None
    """Sequences per rank in one evaluation pass. Default: perDeviceBatchSize."""
    gradient_accumulation: Positive = 1
    """Forward passes per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=10, json_schema_extra=LATE)] = 2e-5
    """Peak learning rate. Default: 2e-5; for LoRA, QLoRA and DoRA 2e-4, for PrefixTuning and PromptTuning 1e-2."""
    scheduler: Literal["Linear", "Cosine", "Constant"] = "Cosine"
    """How the learning rate decreases after the warm-up."""
    warmup_steps: NonNegative | None = None
    """Steps until the learning rate reaches its peak."""
    warmup_ratio: Fraction | None = None
    """The warm-up as a share of all steps. Default: 0.03, when warmupSteps is not set either."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    max_skipped_steps: NonNegative = 10
    """Steps of the run whose gradients may be infinite or NaN. Such a step changes nothing, and training goes on; more of them fail
    the attempt."""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """Maximum tokens in a sequence or a pack. DPO: in each of chosen and rejected; a pack holds twice as many."""
    overlong: Literal["Drop", "Truncate", "Fail"] = "Drop"
    """What happens to an example longer than maxLength. Dropped and truncated examples are counted and reported."""
    packing: bool = True
    """Pack several examples into one sequence. They do not attend to each other."""
    precision: Literal["BF16", "FP32"] = "BF16"
    """Precision of forward and backward. Gradients are reduced, and trained weights are kept, in fp32."""
    activation_checkpointing: Literal["None", "Selective", "Full", "Auto"] = "None"
    """Recompute activations in the backward pass to save memory. Auto: only as much as a memory estimate requires."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    seed: NonNegative = 42
    """Seed of data order, dropout and adapter initialisation."""
    eval_every_steps: Positive | None = None
    """Steps between evaluations. Default: evaluate at the start and the end only."""
    log_every_steps: Positive = 10
    """Steps between progress lines and metrics."""
    early_stopping: EarlyStopping | None = None
    """Stop when the evaluation loss no longer decreases."""
    select: Literal["Last", "Best"] = "Last"
    """Which checkpoint is registered: the last, or the one with the lowest evaluation loss."""


class Gpu(ApiModel):
    """Which GPUs the pods get."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.product) || self.resourceName.startsWith('nvidia.com/')",
                "product is a label that NVIDIA's GPU feature discovery sets: for other GPUs set "
                "podTemplate.spec.nodeSelector",
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
                f"!has(self.nccl) || self.nccl.all(name, !(name in {RESERVED_LIST}))",
                "the operator sets these variables itself (rendezvous, MLflow run, recipe): remove them from nccl",
                ".nccl",
            ),
            (
                "!has(self.gpusPerNode) || !has(self.processesPerNode) || self.processesPerNode <= self.gpusPerNode",
                "processesPerNode is above gpusPerNode, and each process needs a GPU of its own: lower it, or remove it",
                ".processesPerNode",
            ),
            (
                "!has(self.gpu) || has(self.gpusPerNode)",
                "gpu describes the GPUs of gpusPerNode: set that too",
                ".gpu",
            ),
            (
                "!has(self.gpusPerNode) || !has(self.device) || self.device != 'CPU'",
                "device: CPU uses no GPU: remove gpusPerNode",
                ".device",
            ),
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
    """GPU: fail where a pod sees none. CPU: train on CPUs, also where a pod sees GPUs.

    Default: GPUs where a pod sees any, else CPUs for a model of up to a billion parameters.
    """
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
    nccl: EnvMap = Field(default_factory=dict)
    """Environment variables of NCCL, such as NCCL_DEBUG: INFO."""

    @property
    def gpu_resource(self) -> str:
        """The extended resource of the GPUs."""
        return (self.gpu or Gpu()).resource_name

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each pod."""
        return self.processes_per_node or self.gpus_per_node or 1


class Checkpoint(ApiModel):
    """Checkpoints, from which a restart resumes."""

    model_config = ConfigDict(json_schema_extra=renamed(asynchronous=("boolean", "mode: Async or Sync")))

    uri: Uri = ""
    """s3://bucket/folder, or an absolute path on a volume that all pods share. Each job has its own folder in it. Default: a folder
    of the storage that the operator is installed with."""
    every_steps: Annotated[int, Field(ge=1, json_schema_extra=LATE)] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra=LATE)] = 2
    """Number of complete checkpoints to keep."""
    mode: Annotated[Literal["Async", "Sync"], Field(json_schema_extra=LATE)] = "Async"
    """Async: write a checkpoint during the next steps, from a copy in host memory. Sync: write it before the next step."""
