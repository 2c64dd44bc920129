"""The training: base model, method and hyperparameters."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    LIST_TYPE_SET,
    NONE_FOR_ZERO,
    OPERATOR_DEFAULT,
    ApiModel,
    Fraction,
    LongText,
    Name,
    NonNegative,
    ObjectName,
    Positive,
    ReplacedField,
    Uri,
    replaced,
    rules,
)
from finetune_crds.chat import ChatTemplate
from finetune_crds.optimizer import Optimizer

MethodType = Literal["Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning", "PromptTuning"]

LOW_RANK_METHODS = ("LoRA", "QLoRA", "DoRA")  # train low-rank adapters
SOFT_PROMPT_METHODS = ("PrefixTuning", "PromptTuning")  # train virtual tokens
# The same methods, as CEL lists.
_LOW_RANK_LIST = str([*LOW_RANK_METHODS])
_SOFT_PROMPT_LIST = str([*SOFT_PROMPT_METHODS])
DEFAULT_WARMUP_RATIO = 0.03
NEW_TOKENS_CONDITION = (
    f"self.objective.type != 'Distillation' && (self.method.type == 'Full' || self.method.type in {_LOW_RANK_LIST} && "
    "has(self.method.export) && self.method.export == 'Merged')"
)
"""CEL condition of a spec with new tokens."""
NEW_TOKENS_MESSAGE = (
    "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than "
    "Distillation"
)
"""Message of the rule of NEW_TOKENS_CONDITION."""

_PISSA_TYPE_MESSAGE = "lora.init PiSSA requires type LoRA: it changes the frozen weights, which QLoRA quantizes and DoRA normalizes"
"""Message of the rule that PiSSA requires method LoRA."""
MAX_PISSA_RANK = 512
"""Maximum rank with PiSSA. The rank of the registered adapter is twice as high, and must not exceed the maximum of lora.rank."""
_PISSA_RANK_MESSAGE = (
    f"rank must be at most {MAX_PISSA_RANK} when init is PiSSA: the registered adapter has twice the rank"
)
"""Message of the rule on the rank with PiSSA."""

Scheduler = Literal["Linear", "Cosine", "Constant", "WSD"]


class ModelCache(ApiModel):
    """A volume for downloaded models."""

    claim_name: ObjectName
    """PersistentVolumeClaim, of access mode ReadWriteMany if a job has pods on several nodes."""


class Model(ApiModel):
    """The model to start from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.revision) || (!self.base.startsWith('/') && !self.base.contains(':'))",
                "revision can be set only when base is a Hub id",
                ".revision",
            ),
            (
                "!has(self.newTokens) || size(self.newTokens) == 0 || self.adapter != 'Continue'",
                "newTokens must not be set when adapter is Continue: the adapter keeps the vocabulary that it was trained with",
                ".newTokens",
            ),
        )
    )

    base: Uri
    """Hub id (org/name), absolute path on a volume, folder of an object store (s3://, gs://, abfss://), or
    models:/name@alias. When tracking.uri is databricks, also a folder in a volume of Unity Catalog
    (/Volumes/catalog/schema/volume)."""
    revision: Name | None = None
    """Git revision of a Hub model."""
    adapter: Literal["Merge", "Continue"] = "Merge"
    """A base that is an adapter is merged into its own base before the training (Merge), or trained further itself
    (Continue)."""
    new_tokens: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]],
        Field(max_length=64, json_schema_extra=LIST_TYPE_SET),
    ] = Field(default_factory=list)
    """Texts to add as tokens, such as <tool_call>. The embedding and the output layer get a row for each token."""
    chat_template: ChatTemplate | None = None
    """Template that renders conversations. Default: the chat template of the model's tokenizer."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run in the pods."""
    cache: ModelCache | None = None
    """Cache of downloaded models for later attempts and jobs. Default: every attempt downloads the model."""


class Lora(ApiModel):
    """Parameters of low-rank adapters."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.modulesToSave) || !has(self.targetModules) || "
                "!self.modulesToSave.exists(name, name in self.targetModules)",
                "modulesToSave and targetModules must not name the same layer",
                ".modulesToSave",
            ),
            (
                f"!has(self.init) || self.init != 'PiSSA' || !has(self.rank) || self.rank <= {MAX_PISSA_RANK}",
                _PISSA_RANK_MESSAGE,
                ".rank",
            ),
        )
    )

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update."""
    alpha: Positive = 32
    """Scale of the update; see scaling."""
    dropout: Fraction = 0.0
    """Dropout before the adapter."""
    target_modules: Annotated[list[Name], Field(max_length=32, json_schema_extra=LIST_TYPE_SET)] = Field(
        default_factory=list
    )
    """Names of the layers to adapt, such as q_proj. Default: every linear layer except the output."""
    scaling: Literal["Standard", "RankStabilized"] = "Standard"
    """Factor of the update: alpha / rank (Standard), or alpha / sqrt(rank) (RankStabilized, arXiv:2312.03732)."""
    init: Literal["Default", "PiSSA"] = "Default"
    """Initial update: zero (Default), or the principal part of each weight (PiSSA, arXiv:2404.02948), for type LoRA and
    a rank of at most 512. PiSSA subtracts this part from the frozen weight. The registered adapter fits the unchanged
    base, with twice the rank."""
    bias: Literal["All", "LoraOnly"] | None = None
    """Biases of the base to train too: all, or only the biases of adapted layers. Default: no biases."""
    modules_to_save: Annotated[list[Name], Field(max_length=16, json_schema_extra=LIST_TYPE_SET)] = Field(
        default_factory=list
    )
    """Names of layers that are trained in full and stored with the adapter, such as embed_tokens and lm_head. Default: no
    layers."""


class Quantization(ApiModel):
    """The storage of QLoRA's frozen base model."""

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
    """The training method."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"(!has(self.lora) || self.type in {_LOW_RANK_LIST}) && (!has(self.quantization) || self.type == 'QLoRA') && "
                f"(!has(self.softPrompt) || self.type in {_SOFT_PROMPT_LIST})",
                "set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning "
                "and PromptTuning",
            ),
            (
                "!has(self.lora) || !has(self.lora.init) || self.lora.init != 'PiSSA' || self.type == 'LoRA'",
                _PISSA_TYPE_MESSAGE,
                ".lora.init",
            ),
            (
                f"!has(self.export) || self.export == 'Adapter' || self.type in {_LOW_RANK_LIST}",
                "export Merged requires type LoRA, QLoRA or DoRA",
                ".export",
            ),
            (
                "!has(self.softPrompt) || !has(self.softPrompt.initText) || self.type == 'PromptTuning'",
                "softPrompt.initText can be set only when type is PromptTuning",
                ".softPrompt.initText",
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
    export: Literal["Adapter", "Merged"] | None = None
    """Model to register: the adapter alone (Adapter), or the base with the adapter merged into it (Merged). Default:
    Adapter, if the type trains an adapter."""


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
            (
                "!(has(self.epochs) && has(self.maxSteps)) && !(has(self.warmupSteps) && has(self.warmupRatio)) && "
                "!(has(self.decaySteps) && has(self.decayRatio))",
                "must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio",
            ),
            (
                "self.scheduler == 'WSD' || (!has(self.decaySteps) && !has(self.decayRatio))",
                "decaySteps and decayRatio can be set only when scheduler is WSD",
                ".scheduler",
            ),
            (
                "!has(self.warmupRatio) || !has(self.decayRatio) || self.warmupRatio + self.decayRatio <= 1.0",
                "warmupRatio and decayRatio must add up to at most 1: lower one of them",
                ".decayRatio",
            ),
            (
                "!has(self.maxSteps) || !has(self.decaySteps) || "
                "(has(self.warmupSteps) ? self.warmupSteps : 0) + self.decaySteps <= self.maxSteps",
                "warm-up and decay must not be longer than maxSteps: lower decaySteps or warmupSteps",
                ".decaySteps",
            ),
            (
                "!has(self.minLearningRate) || self.scheduler != 'Constant' && "
                "(!has(self.learningRate) || self.minLearningRate < self.learningRate)",
                "minLearningRate must be below learningRate, and requires scheduler Linear, Cosine or WSD",
                ".minLearningRate",
            ),
            (
                "has(self.evalEverySteps) || !has(self.earlyStopping) && (!has(self.select) || self.select == 'Last')",
                "earlyStopping and select Best require evaluations during training: set training.evalEverySteps",
                ".evalEverySteps",
            ),
            (
                "self.optimizer.weights == 'FP32' || self.precision == 'BF16'",
                "optimizer.weights BF16 requires precision BF16",
                ".optimizer.weights",
            ),
        )
        | replaced(overlong=ReplacedField("string", "training.overlong", "replaced by training.truncation"))
    )

    epochs: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Number of passes over the training split. Default: 1 if maxSteps is not set."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    per_device_batch_size: Positive = 4
    """Sequences per rank in one forward pass; with packing, packs of maxLength tokens."""
    per_device_eval_batch_size: Positive | None = None
    """Sequences per rank in one evaluation pass. Default: perDeviceBatchSize."""
    gradient_accumulation: Positive = 1
    """Forward passes per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=10, json_schema_extra=OPERATOR_DEFAULT)] = 2e-5
    """Peak learning rate. Default: 2e-5; for LoRA, QLoRA and DoRA 2e-4, for PrefixTuning and PromptTuning 1e-2."""
    min_learning_rate: Annotated[Annotated[float, Field(ge=0, le=10)] | None, NONE_FOR_ZERO] = None
    """Final learning rate, below learningRate. Default: 0."""
    scheduler: Scheduler = "Cosine"
    """Decrease of the learning rate after the warm-up; WSD decreases it only at the end of the run. WSD: the rate is
    constant, and then decreases as 1 - sqrt(elapsed share of the decay)."""
    warmup_steps: NonNegative | None = None
    """Steps until the learning rate reaches its peak."""
    warmup_ratio: Fraction | None = None
    """The warm-up as a share of all steps. Default: 0.03 if warmupSteps is not set."""
    decay_steps: Positive | None = None
    """WSD: steps at the end of the run in which the learning rate decreases."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """WSD: the decay as a share of all steps. It is at most the share after the warm-up. Default: 0.1 if decaySteps is
    not set."""
    neftune_alpha: Annotated[Annotated[float, Field(ge=0, le=100)] | None, NONE_FOR_ZERO] = None
    """NEFTune (arXiv:2310.05914): noise on the embeddings in training. Each number of an embedding gets noise of up to
    alpha / sqrt(tokens of the example x width). Default: no noise."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight decay of the optimizer."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """The optimizer and its other parameters. Default: AdamW with the parameters of torch."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    max_skipped_steps: NonNegative = 10
    """Maximum number of skipped steps, with infinite or NaN gradients: one more fails the attempt. The maximum is for
    the whole run. FP16: steps that a smaller loss scale can correct are not counted."""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """Maximum tokens in a sequence or a pack; for DPO, KTO, ORPO and SimPO, in each of the two documents of an example.
    A pack of these objectives has twice this limit."""
    truncation: Literal["Drop", "Truncate", "Fail"] = "Drop"
    """Treatment of examples that are longer than maxLength. Dropped and truncated examples are counted and reported."""
    packing: bool = True
    """Pack several examples into one sequence. They do not attend to each other."""
    precision: Literal["BF16", "FP16", "FP32"] = "BF16"
    """Precision of the forward and backward passes. Gradients are reduced, and trained weights are stored, in FP32. FP16:
    for GPUs without BF16; the loss is scaled, and a step that overflows is skipped and lowers the scale."""
    activation_checkpointing: Literal["None", "Selective", "Full", "Auto"] = "None"
    """Recompute activations in the backward pass to save memory; Auto: only as much as a memory estimate requires."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    seed: NonNegative = 42
    """Seed of data order, dropout and adapter initialization."""
    eval_every_steps: Positive | None = None
    """Steps between evaluations. Default: evaluate only at the start and at the end."""
    log_every_steps: Positive = 10
    """Steps between progress lines and metrics."""
    early_stopping: EarlyStopping | None = None
    """Stop when the evaluation loss no longer decreases."""
    select: Literal["Last", "Best"] = "Last"
    """Checkpoint to register: the last one, or the one with the lowest evaluation loss."""
    monitor: Literal["Loss", "Accuracy"] | None = None
    """Number by which earlyStopping and select Best decide: the loss, or the share of pairs whose chosen answer is
    ranked higher (Accuracy). With Accuracy, minDelta is a share. Default: Loss."""

    def warmup_of(self, max_steps: int) -> int:
        """Return the number of warm-up steps in a run of `max_steps` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        ratio = DEFAULT_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
        return math.ceil(ratio * max_steps)
