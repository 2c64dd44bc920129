"""How the model is trained: method, objective, hyperparameters, sharding and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    ApiModel,
    Fraction,
    LongText,
    Name,
    NonNegative,
    Positive,
    StringMap,
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
                "revision is of a Hub model: leave it out where base is a path or a URI",
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
    """Whether code in the model's repository may run in the pods."""


class Lora(ApiModel):
    """Low-rank adapters."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Positive = 32
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before the adapter."""
    target_modules: Annotated[list[Name], Field(max_length=32)] = Field(default_factory=list)
    """Names of the layers to adapt, such as q_proj. Default: every linear layer but the output."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""


class Quantization(ApiModel):
    """How QLoRA stores the frozen base model."""

    type: Literal["NF4", "FP4"] = "NF4"
    """Four-bit data type."""
    double_quantization: bool = True
    """Quantise the quantisation constants too."""


class SoftPrompt(ApiModel):
    """Trained virtual tokens."""

    virtual_tokens: Annotated[int, Field(ge=1, le=1024)] = 20
    """Number of virtual tokens."""
    init_text: LongText | None = None
    """Text whose embeddings the prompt starts from (PromptTuning). Default: embeddings drawn at random."""


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
                "softPrompt.initText needs type PromptTuning: a prefix stands in the attention, and starts from chance",
            ),
        )
    )

    type: MethodType = "Full"
    """Full trains every parameter; the others train a small addition to a frozen model."""
    lora: Lora | None = None
    """Parameters of LoRA, QLoRA and DoRA."""
    quantization: Quantization | None = None
    """Parameters of QLoRA."""
    soft_prompt: SoftPrompt | None = None
    """Parameters of PrefixTuning and PromptTuning."""
    merge: bool | None = None
    """Register the model with its adapter merged in, instead of the adapter. Default: false."""


class Dpo(ApiModel):
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the model is held to the reference."""


class Distillation(ApiModel):
    """Learning from a teacher's probabilities."""

    teacher: Uri
    """The teacher, named like model.base: Hub id, path, s3://bucket/folder, or models:/name@alias."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Softening of both distributions."""
    weight: Fraction = 0.5
    """Share of the teacher in the loss; the rest is cross-entropy on the data."""


class Objective(ApiModel):
    """What the loss is."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.lossOn) || self.type == 'SFT'", "lossOn needs type SFT"),
            ("!has(self.dpo) || self.type == 'DPO'", "dpo needs type DPO"),
            (
                "has(self.distillation) == (self.type == 'Distillation')",
                "distillation and type Distillation go together",
            ),
        )
    )

    type: ObjectiveType = "SFT"
    """SFT: next-token loss. DPO: preferences. Distillation: a teacher."""
    loss_on: Literal["Answer", "All"] | None = None
    """Take the loss on the answer alone or on every token. Default: Answer where prompt and answer are known."""
    dpo: Dpo | None = None
    """Parameters of DPO."""
    distillation: Distillation | None = None
    """Parameters of Distillation."""


class EarlyStopping(ApiModel):
    """Stop when evaluation loss no longer falls."""

    patience: Positive = 3
    """Evaluations without improvement before stopping."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Least fall in evaluation loss that counts."""


class Training(ApiModel):
    """Hyperparameters."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!(has(self.epochs) && has(self.maxSteps))", "set epochs or maxSteps, not both"),
            ("!(has(self.warmupSteps) && has(self.warmupRatio))", "set warmupSteps or warmupRatio, not both"),
            (
                "!has(self.earlyStopping) || has(self.evalSteps)",
                "earlyStopping needs evaluations on the way: set training.evalSteps",
            ),
            (
                "!has(self.loadBest) || !self.loadBest || has(self.evalSteps)",
                "loadBest needs evaluations on the way: set training.evalSteps",
            ),
        )
    )

    epochs: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Passes over the training split. Default: 1, when maxSteps is not set either."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    batch_size: Positive = 4
    """Sequences a rank in one forward pass; with packing, packs of maxLength tokens."""
    eval_batch_size: Positive | None = None
    """Sequences a rank in one evaluation pass. Default: batchSize."""
    gradient_accumulation: Positive = 1
    """Forward passes for one optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-5
    """Peak learning rate."""
    scheduler: Literal["Linear", "Cosine", "Constant"] = "Cosine"
    """How the learning rate falls after warm-up."""
    warmup_steps: NonNegative | None = None
    """Steps until the peak learning rate."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all steps. Default: 0.03, when warmupSteps is not set either."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a sequence, or in a pack. DPO: of each of chosen and rejected; a pack holds twice as much."""
    overlong: Literal["Drop", "Truncate", "Fail"] = "Drop"
    """What happens to an example above maxLength; what is dropped or cut is counted and reported."""
    packing: bool = True
    """Put several examples into one sequence, isolated from each other."""
    precision: Literal["BF16", "FP32"] = "BF16"
    """Arithmetic of forward and backward; gradients are reduced, and trained weights kept, in fp32."""
    activation_checkpointing: Literal["None", "Selective", "Full", "Auto"] = "None"
    """Recompute activations in the backward pass to save memory; Auto: no more than a memory estimate asks for."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    seed: NonNegative = 42
    """Seed of data order, dropout and adapter initialisation."""
    eval_steps: Positive | None = None
    """Steps between evaluations. Default: at the start and the end alone."""
    log_steps: Positive = 10
    """Steps between progress lines and metrics."""
    early_stopping: EarlyStopping | None = None
    """Stop when evaluation loss no longer falls."""
    load_best: bool = False
    """Register the checkpoint with the least evaluation loss instead of the last."""


class Distributed(ApiModel):
    """The gang of pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.nccl) || self.nccl.all(name, !(name in {RESERVED_LIST}))",
                "the operator sets these variables itself (rendezvous, MLflow run, recipe): remove them from nccl",
            ),
        )
    )

    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Pods, one a node."""
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks in each pod: one a GPU."""
    strategy: Literal["FSDP", "HSDP", "DDP"] = "FSDP"
    """FSDP shards over all ranks; HSDP shards in a node and replicates between nodes; DDP replicates.

    QLoRA: the quantised base is whole on each rank, and the strategy shards the adapters alone.
    """
    network_interface: Annotated[str, Field(min_length=1, max_length=15)] | None = None
    """Interface for NCCL and gloo, such as eth0."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of the rendezvous on the first pod."""
    rendezvous_timeout_seconds: Positive = 600
    """How long the ranks wait for each other at the start."""
    collective_timeout_seconds: Positive = 1800
    """How long one collective may take before the attempt counts as failed."""
    nccl: StringMap = Field(default_factory=dict)
    """Environment of NCCL, such as NCCL_DEBUG: INFO."""


class Checkpoint(ApiModel):
    """Where a run can be taken up again."""

    uri: Uri
    """s3://bucket/folder, or an absolute path on a volume that all pods share. A folder a job is made in it."""
    every_steps: Positive = 200
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100)] = 2
    """Complete checkpoints to keep."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory."""
