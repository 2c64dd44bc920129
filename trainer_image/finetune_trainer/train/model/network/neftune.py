"""NEFTune: noise on embeddings in training (Jain et al., arXiv:2310.05914)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch


def add_noise(words: torch.Tensor, batch: Batch, alpha: float) -> torch.Tensor:
    """Return the embeddings of a batch with noise, uniform in +-alpha / sqrt(L x width).

    L is the length of the token's own document, as in the paper. transformers uses the length of the padded
    row: with packing, an example would have less noise than without.

    The noise comes from torch's generator, which each step seeds.

    Args:
        words: the embeddings [rows, length, width].
        batch: the documents.
        alpha: the scale.
    """
    rows, length, width = words.shape
    sizes = batch.cu_seqlens.diff()
    # The documents, with the padding, fill the rows. NB: without `output_size`, the CPU would wait for the GPU to compute it.
    own_sizes = torch.repeat_interleave(sizes, sizes, output_size=rows * length).view(rows, length, 1)
    scale = alpha * (own_sizes.float() * width).rsqrt()
    return words + torch.empty_like(words).uniform_(-1, 1) * scale.to(words.dtype)
