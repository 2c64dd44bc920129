"""How the model is trained: method, objective, hyperparameters, sharding and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    A_SET,
    ApiModel,
    EnvMap,
    Fraction,
    LongText,
    Name,
    NonNegative,
    Positive,
    Uri,
    rules,
)
from finetune_crds.env import RESERVED_LIST

MethodType = Literal["Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning", "PromptTuning"]
ObjectiveType = Literal["SFT", "DPO", "Distillation"]

# Methods that train low-rank adapters, and those that train virtual tokens; below as CEL lists.
LOW_RANK = ("LoRA", "QLoRA", "DoRA")
SOFT_PROMPTS = ("PrefixTuning", "PromptTuning")
_ADAPTERS = str([*LOW_RANK])
_SOFT_PROMPTS = str([*SOFT_PROMPTS])


class Model(ApiModel):
    """The model to start from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.revision) || (!self.base.startsWith('/') && !self.base.contains(':'))",
                "revision applies to Hub models only: remove it where base is a path or a URI",
            ),
        )
    )

    base: Uri
    """Hub id (org/name), absolute path on a volume, s3://bucket/folder, or models:/name@alias."""
    revision: Name | None = None
    """Git revision of a Hub model."""
    chat_template: LongText | None = None
    """Jinja chat template; replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run in the pods."""


class Lora(ApiModel):
    """Parameters of low-rank adapters."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Positive = 32
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before the adapter."""
    target_modules: Annotated[list[Name], Field(max_length=32, json_schema_extra=A_SET)] = Field(
        default_factory=list
    )
    """Names of the layers to adapt, such as q_proj. Default: every linear layer except the output."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""


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
            (f"!has(self.lora) || self.type in {_ADAPTERS}", "lora needs type LoRA, QLoRA or DoRA"),
            ("!has(self.quantization) || self.type == 'QLoRA'", "quantization needs type QLoRA"),
            (
                f"!has(self.softPrompt) || self.type in {_SOFT_PROMPTS}",
                "softPrompt needs type PrefixTuning or PromptTuning",
            ),
            (
                f"!has(self.merge) || !self.merge || self.type in {_ADAPTERS}",
                "merge needs type LoRA, QLoRA or DoRA",
            ),
            (
                "!has(self.softPrompt) || !has(self.softPrompt.initText) || self.type == 'PromptTuning'",
                "softPrompt.initText needs type PromptTuning: PrefixTuning starts from random values",
            ),
        )
    )

    type: MethodType = "Full"
    """Full trains every parameter; the other types train a small addition to a frozen model."""
    lora: Lora | None = None
    """Parameters of LoRA, QLoRA and DoRA."""
    quantization: Quantization | None = None
    """Parameters of QLoRA."""
    soft_prompt: SoftPrompt | None = None
    """Parameters of PrefixTuning and PromptTuning."""
    merge: bool | None = None
    """Register the model with its adapter merged in, instead of the adapter. Default: false."""


class Dpo(ApiModel):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""


class Distillation(ApiModel):
    """Training on the probabilities of a teacher model."""

    teacher: Uri
    """The teacher, named like model.base: Hub id, path, s3://bucket/folder, or models:/name@alias."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Temperature of both distributions."""
    weight: Fraction = 0.5
    """Share of the teacher in the loss. The rest is cross-entropy on the data."""


class Objective(ApiModel):
    """What the loss is."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.lossOn) || self.type == 'SFT'", "lossOn needs type SFT"),
            ("!has(self.dpo) || self.type == 'DPO'", "dpo needs type DPO"),
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
            ("!(has(self.epochs) && has(self.maxSteps))", "set epochs or maxSteps, not both"),
            ("!(has(self.warmupSteps) && has(self.warmupRatio))", "set warmupSteps or warmupRatio, not both"),
            (
                "!has(self.earlyStopping) || has(self.evalSteps)",
                "earlyStopping needs evaluations during training: set training.evalSteps",
            ),
            (
                "!has(self.loadBest) || !self.loadBest || has(self.evalSteps)",
                "loadBest needs evaluations during training: set training.evalSteps",
            ),
        )
    )

    epochs: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Passes over the training split. Default: 1, when maxSteps is not set either."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    batch_size: Positive = 4
    """Sequences per rank in one forward pass. With packing: packs of maxLength tokens."""
    eval_batch_size: Positive | None = None
    """Sequences per rank in one evaluation pass. Default: batchSize."""
    gradient_accumulation: Positive = 1
    """Forward passes per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-5
    """Peak learning rate."""
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
    eval_steps: Positive | None = None
    """Steps between evaluations. Default: evaluate at the start and the end only."""
    log_steps: Positive = 10
    """Steps between progress lines and metrics."""
    early_stopping: EarlyStopping | None = None
    """Stop when the evaluation loss no longer decreases."""
    load_best: bool = False
    """Register the checkpoint with the lowest evaluation loss instead of the last."""


class Distributed(ApiModel):
    """The pods of one training attempt, which start and restart together."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.nccl) || self.nccl.all(name, !(name in {RESERVED_LIST}))",
                "the operator sets these variables itself (rendezvous, MLflow run, recipe): remove them from nccl",
            ),
        )
    )

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of pods, one per node."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks in each pod: one per GPU."""
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


class Checkpoint(ApiModel):
    """Checkpoints, from which a restart resumes."""

    uri: Uri
    """s3://bucket/folder, or an absolute path on a volume that all pods share. Each job has its own folder in it."""
    every_steps: Positive = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of complete checkpoints to keep."""
    asynchronous: bool = True
    """Write checkpoints during training, from a copy in host memory."""
