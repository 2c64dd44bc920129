"""The models that are trained: Llamas with random weights, by the numbers of their configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Dense bf16 operations a second without sparsity, from NVIDIA's data sheets of the H100 SXM, the H200 and the A100.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """A Llama, and how the benchmark trains it.

    sequences: sequences of maxLength tokens that a rank takes in a step.
    checkpoint_steps: steps between checkpoints in the run that measures them.
    """

    name: str
    method: str
    precision: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    tied: bool
    sequences: int
    warmup: int
    steps: int
    checkpoint_steps: int
    rope: dict[str, Any] | None = None

    @property
    def parameters(self) -> int:
        """All of the model's parameters."""
        attention = 2 * self.width * self.head_size * (self.heads + self.key_value_heads)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return embeddings + self.layers * layer + self.width

    @property
    def multiplied(self) -> int:
        """Parameters that tokens are multiplied with: all but an embedding that is not the output layer too."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.width)

    def operations(self, length: float) -> float:
        """Floating-point operations of training on one token: 6N + 12 L H S.

        PaLM (arXiv:2204.02311), appendix B: N parameters, L layers, H width of all heads, S `length` of the
        sequence; nothing for what is computed twice. By custom the same for LoRA, though frozen weights need no
        gradient of their own.
        """
        return 6 * self.multiplied + self._attention(length)

    def operations_needed(self, length: float) -> float:
        """The operations that the method needs for one token: 4N + 12 L H S where the weights are frozen."""
        return (4 if self.method == "LoRA" else 6) * self.multiplied + self._attention(length)

    def _attention(self, length: float) -> float:
        return 12 * self.layers * self.heads * self.head_size * length


SMALL = Shape(
    name="small",
    method="Full",
    precision="FP32",
    vocabulary=8192,
    width=256,
    inner=688,
    layers=4,
    heads=4,
    key_value_heads=2,
    head_size=64,
    tied=True,
    sequences=1,
    warmup=2,
    steps=10,
    checkpoint_steps=2,
)

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LLAMA_1B = Shape(
    name="llama-3.2-1b",
    method="Full",
    precision="BF16",
    vocabulary=128_256,
    width=2048,
    inner=8192,
    layers=16,
    heads=32,
    key_value_heads=8,
    head_size=64,
    tied=True,
    sequences=4,
    warmup=10,
    steps=30,
    checkpoint_steps=20,
    rope={**_LLAMA_3_ROPE, "factor": 32.0},
)

LLAMA_8B = Shape(
    name="llama-3.1-8b",
    method="LoRA",
    precision="BF16",
    vocabulary=128_256,
    width=4096,
    inner=14_336,
    layers=32,
    heads=32,
    key_value_heads=8,
    head_size=128,
    tied=False,
    sequences=2,
    warmup=10,
    steps=20,
    checkpoint_steps=10,
    rope={**_LLAMA_3_ROPE, "factor": 8.0},
)

SHAPES = {shape.name: shape for shape in (SMALL, LLAMA_1B, LLAMA_8B)}


def peak(gpu: str | None) -> float | None:
    """A GPU's dense bf16 operations a second, by its name; None: not known."""
    return next((value for name, value in PEAKS.items() if gpu is not None and name in gpu), None)
