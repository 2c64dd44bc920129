"""The output layer of a model: its logits or rewards, and losses that compute logits in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from finetune_trainer.train.model.network import chunked_loss, task

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    Results = tuple[torch.Tensor, torch.Tensor]
    """Two tensors, for example the summed loss and the sums for the metrics."""


class Head(nn.Module):
    """The output layer, as a module that contains the model's own layer.

    FSDP gathers the weights of a module before its forward pass, and reduces their gradients after its backward pass. Losses apply the
    output layer once per chunk, and some apply it twice to a batch. So the forward pass of this module is the whole computation of a
    loss from hidden states, and the layer is gathered and reduced once per batch.

    Args:
        base: a language model or a reward model, without peft's wrapper.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.layer = task.get_output_layer(base)
        self.is_score = task.of_model(base) == "RewardModel"
        """Whether the layer computes the reward of a document from its last token, instead of the logits of each token."""
        self.chunk_numbers = chunked_loss.SMALL_CHUNK_NUMBERS
        """Logits of a chunk, of all its tokens together."""
        self._config: Any = base.config.get_text_config()

    def forward(self, hidden: torch.Tensor, computation: Callable[[torch.Tensor], Results]) -> Results:
        """Return the result of a computation that applies this layer to hidden states [tokens, width]."""
        return computation(hidden)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self._config.vocab_size)

    @property
    def outputs(self) -> int:
        """The number of logits per token; 1 for a reward."""
        return 1 if self.is_score else self.vocabulary

    @property
    def chunk(self) -> int:
        """The number of tokens in a chunk."""
        return max(1, self.chunk_numbers // self.outputs)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of some hidden states, fp32 [..., outputs], scaled as the model's own forward does."""
        logits = _apply(self.layer, hidden).float()
        if self.is_score:
            return logits
        config = self._config
        factors = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
        divisor = getattr(config, "logits_scaling", None)
        if divisor is not None:
            # HyperCLOVA X multiplies where other models divide.
            factors.append(divisor if config.model_type == "hyperclovax" else 1 / divisor)
        for factor in factors:
            if factor is not None:
                logits = logits * factor
        # RecurrentGemma has its own name for the cap.
        cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def sum_loss(self, score: chunked_loss.Score, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of a loss over all chunks, an fp32 scalar, differentiable in hidden states and parameters.

        Args:
            score: the loss of a chunk.
            hidden: last hidden states [tokens, width].
        """
        return chunked_loss.sum_loss(score, self.compute_logits, hidden, list(self.parameters()), self.chunk)

    def compute_log_probabilities(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each target, in nats, fp32 [tokens], without a gradient."""
        return chunked_loss.compute_log_probabilities(self.compute_logits, hidden, targets, self.chunk)


def _apply(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of an output layer, with the trained rows of new tokens.

    NB: peft's own forward copies the whole weight for each chunk of tokens to insert these rows, and computes the gradient of the copy.
    """
    adapter = getattr(layer, "token_adapter", None)
    if adapter is None:
        frozen_logits: torch.Tensor = layer(hidden)
        return frozen_logits
    (ids,) = adapter.token_indices.values()
    (rows,) = adapter.trainable_tokens_delta.values()
    logits: torch.Tensor = adapter.base_layer(hidden)
    positions = torch.tensor(ids, device=hidden.device)
    return logits.index_copy(-1, positions, functional.linear(hidden, rows.to(hidden.dtype)))
