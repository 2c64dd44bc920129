"""Estimates the memory of a rank before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from finetune_trainer.train.model import precision
from finetune_trainer.train.model.network import chunked_loss

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.model.memory.model_shape import Shape
    from finetune_trainer.train.runtime.distributed import World

GIB = 2**30
_FP32_BYTES = 4
# Two moments, each a code of one byte and an fp32 scale for every 256 codes.
_EIGHT_BIT_MOMENTS_BYTES = 2 * (1 + 4 / 256)
# Activations that a layer keeps per token, in units of width x bytes per number, without attention weights (counted as in
# Korthikanti et al., arXiv:2205.05198, table 2). Measured as the memory that a Llama's forward pass leaves allocated
# (tests/unit/trainer/model/memory/test_estimate.py repeats it).
# In widths of the model. With None, 12 is between the 11 widths measured in fp32 and the 13 in bf16, where norms compute in fp32.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 5.0, "Full": 1.0}
# In widths of the feed-forward layer.
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 1.0, "Full": 0.0}
# Adapters add matrix products: with Selective, a planned Llama 3.1 8B keeps 5 + 1 widths of the model and 1 + 1 of the feed-forward layer.
# With None, adapters save 4 widths of the model: the weights of norms are frozen, and their gradients would need fp32 numbers.
_ADAPTER_ATTENTION_WIDTHS = {"None": -4.0, "Selective": 1.0, "Full": 0.0}
_ADAPTER_FEED_FORWARD_WIDTHS = {"None": 0.0, "Selective": 1.0, "Full": 0.0}
# Widths per copy of a token for an expert: the input of the expert, its output, and the output times the router's weight.
_EXPERT_COPY_WIDTHS = {"None": 3.0, "Selective": 0.0, "Full": 0.0}
# Bytes per logit of a chunk: the logit, its log-probability and its gradient, all fp32. FP16 adds a scaled copy of the gradient, and
# distillation adds numbers of the teacher and of the divergence. tests/unit/trainer/model/memory/test_estimate.py counts them.
_LOGIT_BYTES, _FP16_LOGIT_BYTES, _DISTILLATION_LOGIT_BYTES = 12, 16, 24


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """Gathered weights of the current and the next layer, the embedding and the output layer, and one of their gradients during its reduction."""
    logits: float
    """Logits of a chunk with their gradients."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered + self.logits

    def __str__(self) -> str:
        labels = {"gathered": "gathered layers"}
        parts = ", ".join(f"{labels.get(name, name)} {size / GIB:.1f}" for name, size in asdict(self).items())
        return f"{self.total / GIB:.1f} GiB a rank ({parts})"


def estimate(
    shape: Shape,
    recipe: Recipe,
    *,
    shards: int,
    row_tokens: int,
    recompute: str,
    chunk_numbers: int = chunked_loss.SMALL_CHUNK_NUMBERS,
) -> Estimate:
    """Estimate the peak memory of one rank in a step.

    Trained weights and their gradients are fp32 or bf16, with the moments of their optimizer; frozen weights have the
    dtype that they compute in. tests/long/trainer/test_plans.py compares this with planned steps.

    Args:
        shape: the model.
        recipe: precision, method and batch size.
        shards: number of ranks over which parameters are sharded.
        row_tokens: tokens per row of a batch.
        recompute: None, Selective or Full.
        chunk_numbers: logits in a chunk of the loss.
    """
    tokens = recipe.training.per_device_batch_size * row_tokens
    # The batch may have fewer logits than a chunk.
    logits = min(chunk_numbers, tokens * shape.outputs)
    step = _Step(shape, recipe, shards, tokens, recompute, logits)
    phases = (
        step.gather_embedding(),
        step.compute_loss(),
        step.gather_last_layer(),
        step.recompute_last_layer(),
        step.reduce_embedding(),
    )
    return max(phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class _Step:
    """A step of one rank. The first five methods estimate the memory of one phase each, in the order of the step.

    tokens: tokens in a batch.
    logits: logits in a chunk of the loss.
    shape, recipe, shards, recompute: as in `estimate`.
    """

    shape: Shape
    recipe: Recipe
    shards: int
    tokens: int
    recompute: str
    logits: int

    def gather_embedding(self) -> Estimate:
        """FSDP gathers the embedding: the forward pass begins."""
        # Half of `copied`: the copy without its gradient.
        gathered = self.buffers * self.embedding + self.shape.copied / 2
        return replace(self.baseline, gathered=self.compute_bytes * gathered)

    def compute_loss(self) -> Estimate:
        """The loss computes a chunk of logits, and the gradient of the output layer."""
        baseline = self.baseline
        return replace(
            baseline,
            # An fp32 sum over the chunks, and the gradient of one chunk.
            gradients=baseline.gradients + (_FP32_BYTES + self.compute_bytes) * self.shape.head,
            activations=self.activations,
            gathered=baseline.gathered + self.compute_bytes * self.output,
            logits=_bytes_per_logit(self.recipe) * self.logits,
        )

    def gather_last_layer(self) -> Estimate:
        """FSDP gathers the last layer in addition to the output layer: the backward pass begins."""
        baseline = self.baseline
        # The output layer; with several ranks, also a second copy of it, and the last layer.
        gathered = self.output + (self.buffers - 1) * (self.output + self.layer)
        return replace(
            baseline,
            activations=self.activations,
            gathered=baseline.gathered + self.compute_bytes * gathered,
        )

    def recompute_last_layer(self) -> Estimate:
        """The last layer is recomputed in full, and its gradient computed, while the layer before it is gathered."""
        baseline, shape = self.baseline, self.shape
        # The gradient of an untied output layer is being reduced; a tied layer's gradient waits for the embedding's.
        output_gradient = (
            self.compute_bytes * shape.head if shape.tied else _FP32_BYTES * shape.output_trained
        )
        # As the backward pass computes it, and its fp32 copy that is reduced.
        layer_gradient = (self.compute_bytes + _FP32_BYTES) * self.trained_layer
        layer_activations = estimate_activation_bytes(shape, self.tokens, self.compute_bytes, "None")
        return replace(
            baseline,
            gradients=baseline.gradients + layer_gradient + output_gradient,
            activations=self.activations + layer_activations / max(1, shape.layers),
            gathered=baseline.gathered + 2 * self.compute_bytes * self.layer,
        )

    def reduce_embedding(self) -> Estimate:
        """The gradient of the embedding is reduced, by a copy in an fp32 buffer: the backward pass ends."""
        baseline, shape = self.baseline, self.shape
        embedding_gradient = (self.compute_bytes + _FP32_BYTES) * shape.embedding_trained
        reduced = embedding_gradient + self.compute_bytes * shape.copied
        return replace(baseline, gradients=self.all_gradients, gathered=max(baseline.gathered, reduced))

    @cached_property
    def baseline(self) -> Estimate:
        """The memory that a rank uses throughout the step."""
        shape = self.shape
        frozen = shape.parameters - shape.trained - shape.unsharded
        sharded = (
            self.trained_bytes * shape.trained + self.compute_bytes * frozen + _FP32_BYTES * shape.initial
        )
        always_gathered = self.embedding if shape.tied else 0
        return Estimate(
            weights=sharded / self.shards + self.compute_bytes * shape.teacher + shape.unsharded_bytes,
            gradients=self.all_gradients if self.is_accumulating else 0,
            optimizer=_optimizer_bytes(shape, self.recipe) / self.shards,
            activations=0,
            gathered=self.compute_bytes * always_gathered,
            logits=0,
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in the forward pass."""
        return int(precision.compute_dtype(self.recipe.training.precision).itemsize)

    @property
    def trained_bytes(self) -> int:
        """Bytes per number of the trained weights."""
        return int(precision.trained_dtype(self.recipe.training).itemsize)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of earlier passes of a step stay in memory."""
        return self.recipe.training.gradient_accumulation > 1

    @property
    def all_gradients(self) -> float:
        """Bytes of the gradients of all trained weights."""
        # With HSDP and DDP, gradients accumulate in fp32 until they are summed over the replicas.
        in_fp32 = self.is_accumulating and self.recipe.distributed.strategy != "FSDP"
        number_bytes = _FP32_BYTES if in_fp32 else self.trained_bytes
        return number_bytes * self.shape.trained / self.shards

    @property
    def activations(self) -> float:
        """Bytes that the forward pass of all layers keeps."""
        return estimate_activation_bytes(self.shape, self.tokens, self.compute_bytes, self.recompute)

    @property
    def has_whole_base(self) -> bool:
        """Whether each rank holds all frozen weights, so that FSDP does not gather them (`shard.shard`)."""
        return self.shape.unsharded > 0 or self.shards == 1

    @property
    def embedding(self) -> int:
        """Parameters of the embedding that FSDP gathers."""
        return self.shape.embedding_trained if self.has_whole_base else self.shape.embedding

    @property
    def output(self) -> int:
        """Parameters of the output layer that FSDP gathers."""
        return self.shape.output_trained if self.has_whole_base else self.shape.output

    @property
    def layer(self) -> float:
        """Parameters of a layer that FSDP gathers."""
        shape = self.shape
        if self.has_whole_base:
            return self.trained_layer
        return (shape.parameters - shape.embedding - shape.output) / max(1, shape.layers)

    @property
    def trained_layer(self) -> float:
        """Trained parameters of a layer."""
        shape = self.shape
        return (shape.trained - shape.embedding_trained - shape.output_trained) / max(1, shape.layers)

    @property
    def buffers(self) -> int:
        """Copies of gathered weights: with several ranks, FSDP gathers them into a buffer and copies them out of it."""
        return 1 if self.shards == 1 else 2


def estimate_activation_bytes(shape: Shape, tokens: int, number_bytes: int, recompute: str) -> float:
    """Return the bytes of activations that a forward pass of all layers keeps for the backward pass.

    Args:
        shape: the model.
        tokens: in a batch.
        number_bytes: bytes per number of the activations.
        recompute: None, Selective or Full.
    """
    attention, feed_forward = _ATTENTION_WIDTHS[recompute], _FEED_FORWARD_WIDTHS[recompute]
    if shape.trained < shape.parameters:
        attention += _ADAPTER_ATTENTION_WIDTHS[recompute]
        feed_forward += _ADAPTER_FEED_FORWARD_WIDTHS[recompute]
    widths = attention * shape.width + feed_forward * shape.feed_forward
    widths += _EXPERT_COPY_WIDTHS[recompute] * shape.copies * shape.width
    # NB: in each forward pass, peft adds the product of an expert adapter to the weights of all experts.
    expert_numbers = shape.adapted_experts if recompute == "None" else 0
    return number_bytes * (shape.layers * tokens * widths + expert_numbers)


def _bytes_per_logit(recipe: Recipe) -> int:
    if recipe.objective.type == "Distillation":
        return _DISTILLATION_LOGIT_BYTES
    return _FP16_LOGIT_BYTES if recipe.training.precision == "FP16" else _LOGIT_BYTES


def _optimizer_bytes(shape: Shape, recipe: Recipe) -> float:
    """Return the bytes of the optimizer states of all trained weights: two fp32 moments per number in AdamW, one in Muon.

    AdamW8bit has two moments too: in fp32 for embeddings, in 8 bits for all other weights, as if none were small.
    """
    kind, adamw_bytes = recipe.training.optimizer.type, 2 * _FP32_BYTES
    if kind == "Muon":
        # The numbers outside the matrices are trained by AdamW.
        return _FP32_BYTES * shape.matrices + adamw_bytes * (shape.trained - shape.matrices)
    if kind == "AdamW8bit":
        return adamw_bytes * shape.embeddings + _EIGHT_BIT_MOMENTS_BYTES * (shape.trained - shape.embeddings)
    return adamw_bytes * shape.trained


def estimate_staged_bytes(shape: Shape, recipe: Recipe, *, shards: int) -> float:
    """Estimate the bytes of the copy of a rank's trained state in host memory, from which asynchronous checkpoints are written."""
    if recipe.checkpoint is None or recipe.checkpoint.mode != "Async":
        return 0.0
    trained_bytes: int = precision.trained_dtype(recipe.training).itemsize
    weight_bytes = trained_bytes * shape.trained + _FP32_BYTES * shape.initial
    return (weight_bytes + _optimizer_bytes(shape, recipe)) / shards


def count_shards(recipe: Recipe, world: World) -> int:
    """Return over how many ranks parameters are sharded."""
    return {"FSDP": world.size, "HSDP": world.local_size, "DDP": 1}[recipe.distributed.strategy]
