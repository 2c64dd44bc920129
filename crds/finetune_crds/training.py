"""How the model is trained: base model, method and hyperparameters."""

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

# Methods that train low-rank adapters, and those that train virtual tokens; below as CEL lists.
LOW_RANK_METHODS = ("LoRA", "QLoRA", "DoRA")
SOFT_PROMPT_METHODS = ("PrefixTuning", "PromptTuning")
_LOW_RANK_LIST = str([*LOW_RANK_METHODS])
_SOFT_PROMPT_LIST = str([*SOFT_PROMPT_METHODS])
DEFAULT_WARMUP_RATIO = 0.03
NEW_TOKENS_MESSAGES = {
    f"!(self.method.type in {_SOFT_PROMPT_LIST})": (
        "model.newTokens requires method.type Full, LoRA, QLoRA or DoRA: virtual tokens train no embedding"
    ),
    f"!(self.method.type in {_LOW_RANK_LIST}) || (has(self.method.export) && self.method.export == 'Merged')": (
        "model.newTokens requires method.export Merged when an adapter is trained: the base has no rows for the new tokens"
    ),
    "self.objective.type != 'Distillation'": (
        "model.newTokens must not be set when objective.type is Distillation: the teacher has no rows for the new tokens"
    ),
}
"""CEL conditions on a spec with new tokens, and what is said where one does not hold."""

_PISSA_TYPE_MESSAGE = "lora.init PiSSA requires type LoRA: it changes the frozen weights, which QLoRA quantizes and DoRA normalizes"
"""What is said where a method other than LoRA has PiSSA."""
MAX_PISSA_RANK = 512
"""The largest rank with PiSSA: twice as much is that of an adapter which can be trained further."""
_PISSA_RANK_MESSAGE = (
    f"rank must be at most {MAX_PISSA_RANK} when init is PiSSA: the registered adapter has twice the rank"
)
"""What is said where the rank is larger."""

Scheduler = Literal["Linear", "Cosine", "Constant", "WSD"]


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
    """Hub id (org/name), absolute path on a volume, folder of an object store (s3://, gs://, abfss://) or, with
    tracking.uri databricks, of a volume of Unity Catalog (/Volumes/catalog/schema/volume), or models:/name@alias."""
    revision: Name | None = None
    """Git revision of a Hub model."""
    adapter: Literal["Merge", "Continue"] = "Merge"
    """What happens where base is an adapter that is not merged. Merge: it is merged into its own base, and training starts from that.
    Continue: the adapter itself is trained further."""
    new_tokens: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]],
        Field(max_length=64, json_schema_extra=LIST_TYPE_SET),
    ] = Field(default_factory=list)
    """Texts that become tokens of their own, such as <tool_call>. Embedding and output layer get a row for each."""
    chat_template: ChatTemplate | None = None
    """What renders conversations. Default: the chat template of the model's tokenizer."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run in the pods."""
    cache: ModelCache | None = None
    """Where downloaded models are kept for later attempts and jobs. Default: every attempt downloads the model."""


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
    """Standard: the update is multiplied by alpha / rank. RankStabilized: by alpha / sqrt(rank) (arXiv:2312.03732)."""
    init: Literal["Default", "PiSSA"] = "Default"
    """How the update begins. Default: as zero. PiSSA: as the principal part of each weight, which the frozen weight loses
    (arXiv:2404.02948); what is registered is an adapter of the base as it was, of twice the rank. Type LoRA only,
    and a rank of at most 512."""
    bias: Literal["All", "LoraOnly"] | None = None
    """Biases of the base that are trained too: all, or those of the adapted layers. Default: none."""
    modules_to_save: Annotated[list[Name], Field(max_length=16, json_schema_extra=LIST_TYPE_SET)] = Field(
        default_factory=list
    )
    """Names of layers that are trained whole and stored with the adapter, such as embed_tokens and lm_head. Default: none."""


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
            (
                f"!has(self.lora) || self.type in {_LOW_RANK_LIST}",
                "lora can be set only when type is LoRA, QLoRA or DoRA",
                ".lora",
            ),
            (
                "!has(self.lora) || !has(self.lora.init) || self.lora.init != 'PiSSA' || self.type == 'LoRA'",
                _PISSA_TYPE_MESSAGE,
                ".lora.init",
            ),
            (
                "!has(self.quantization) || self.type == 'QLoRA'",
                "quantization can be set only when type is QLoRA",
                ".quantization",
            ),
            (
                f"!has(self.softPrompt) || self.type in {_SOFT_PROMPT_LIST}",
                "softPrompt can be set only when type is PrefixTuning or PromptTuning",
                ".softPrompt",
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
    """What is registered: the adapter alone, or the model with the adapter merged into it. Default: Adapter, where the type trains
    one."""


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
                "!(has(self.decaySteps) && has(self.decayRatio))",
                "set decaySteps or decayRatio, not both",
                ".decayRatio",
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
                "!has(self.minLearningRate) || self.scheduler != 'Constant'",
                "minLearningRate requires a learning rate that decreases: set scheduler to Linear, Cosine or WSD",
                ".minLearningRate",
            ),
            (
                "!has(self.minLearningRate) || !has(self.learningRate) || self.minLearningRate < self.learningRate",
                "minLearningRate must be below learningRate: lower it",
                ".minLearningRate",
            ),
            (
                "!has(self.earlyStopping) || has(self.evalEverySteps)",
                "earlyStopping requires evaluations during training: set training.evalEverySteps",
                ".earlyStopping",
            ),
            (
                "!has(self.select) || self.select == 'Last' || has(self.evalEverySteps)",
                "select Best requires evaluations during training: set training.evalEverySteps",
                ".select",
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
    """Passes over the training split. Default: 1, when maxSteps is not set either."""
    max_steps: Positive | None = None
    """Optimizer steps."""
    per_device_batch_size: Positive = 4
    """Sequences per rank in one forward pass. With packing: packs of maxLength tokens."""
    per_device_eval_batch_size: Positive | None = None
    """Sequences per rank in one evaluation pass. Default: perDeviceBatchSize."""
    gradient_accumulation: Positive = 1
    """Forward passes per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=10, json_schema_extra=OPERATOR_DEFAULT)] = 2e-5
    """Peak learning rate. Default: 2e-5; for LoRA, QLoRA and DoRA 2e-4, for PrefixTuning and PromptTuning 1e-2."""
    min_learning_rate: Annotated[Annotated[float, Field(ge=0, le=10)] | None, NONE_FOR_ZERO] = None
    """What the learning rate decreases to, below learningRate. Default: 0."""
    scheduler: Scheduler = "Cosine"
    """How the learning rate decreases after the warm-up. WSD: it is constant, and decreases in the last steps of the run, as
    1 - sqrt(share of the decay)."""
    warmup_steps: NonNegative | None = None
    """Steps until the learning rate reaches its peak."""
    warmup_ratio: Fraction | None = None
    """The warm-up as a share of all steps. Default: 0.03, when warmupSteps is not set either."""
    decay_steps: Positive | None = None
    """WSD: steps at the end of the run in which the learning rate decreases."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """WSD: the decay as a share of all steps, no more than the warm-up leaves. Default: 0.1, when decaySteps is not set either."""
    neftune_alpha: Annotated[Annotated[float, Field(ge=0, le=100)] | None, NONE_FOR_ZERO] = None
    """NEFTune: noise of up to alpha / sqrt(tokens of the example x width) on each number of an embedding, in training alone
    (arXiv:2310.05914). Default: no noise."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The optimizer's weight decay."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Which optimizer, and its further parameters. Default: AdamW with those of torch."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    max_skipped_steps: NonNegative = 10
    """Steps of the run whose gradients may be infinite or NaN. Such a step changes nothing, and training goes on; more of them fail
    the attempt. FP16: without those that a smaller scale of the loss may mend."""
    max_length: Annotated[int, Field(ge=8)] = 2048
    """Maximum tokens in a sequence or a pack. DPO, KTO, ORPO, SimPO: in each of an example's two documents; a pack holds twice as many."""
    truncation: Literal["Drop", "Truncate", "Fail"] = "Drop"
    """What happens to an example longer than maxLength. Dropped and truncated examples are counted and reported."""
    packing: bool = True
    """Pack several examples into one sequence. They do not attend to each other."""
    precision: Literal["BF16", "FP16", "FP32"] = "BF16"
    """Precision of forward and backward. Gradients are reduced, and trained weights are kept, in fp32. FP16: for GPUs without
    BF16; the loss is scaled, and a step that this made overflow is skipped with a smaller scale."""
    activation_checkpointing: Literal["None", "Selective", "Full", "Auto"] = "None"
    """Recompute activations in the backward pass to save memory. Auto: only as much as a memory estimate requires."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    seed: NonNegative = 42
    """Seed of data order, dropout and adapter initialization."""
    eval_every_steps: Positive | None = None
    """Steps between evaluations. Default: evaluate at the start and the end only."""
    log_every_steps: Positive = 10
    """Steps between progress lines and metrics."""
    early_stopping: EarlyStopping | None = None
    """Stop when the evaluation loss no longer decreases."""
    select: Literal["Last", "Best"] = "Last"
    """Which checkpoint is registered: the last, or the one with the lowest evaluation loss."""

    def warmup_of(self, max_steps: int) -> int:
        """The steps of the warm-up in a run of `max_steps` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        ratio = DEFAULT_WARMUP_RATIO if self.warmup_ratio is None else self.warmup_ratio
        return math.ceil(ratio * max_steps)
