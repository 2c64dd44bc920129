"""The input of the checks of a network before its first step, and the key of what their results depend on."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from finetune_crds import continuation
from finetune_trainer.pod.release import get_release
from finetune_trainer.train.data import dataset, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.runtime.distributed import World

# Tokens of a document, and how many documents there are.
DOCUMENT_TOKENS = 8
_DOCUMENT_COUNT = 3
_LIBRARIES = ("torch", "transformers", "peft")


def compute_key(recipe: Recipe, world: World) -> str:
    """Return what the results of the checks depend on: the settings, this release, the libraries and the devices of all ranks.

    All ranks call this together and get the same key, so that either all of them run a check or none does.
    """
    device = world.card.name if world.card is not None else world.device.type
    devices = ", ".join(sorted(set(world.gather(device))))
    libraries = " ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"{continuation.digest(recipe)} {get_release()} {libraries} {devices}"


def build_documents(vocabulary: int) -> list[np.ndarray]:
    """Return three documents of tokens from the middle of a vocabulary: its ends have special tokens, for example for images."""
    count = _DOCUMENT_COUNT * DOCUMENT_TOKENS
    # Evenly spaced in the second and third quarter of the vocabulary. NB: the tokens repeat if the vocabulary is smaller than `count`.
    spacing = max(1, vocabulary // 2 // count)
    tokens = (vocabulary // 4 + np.arange(count) * spacing) % vocabulary
    # NB: in random order, since a model may have learned to continue evenly increasing tokens, whatever the rest of the document is.
    return np.array_split(np.random.default_rng(0).permutation(tokens), _DOCUMENT_COUNT)


def build_batch(
    documents: Sequence[np.ndarray], rows: Sequence[Sequence[int]], device: torch.device
) -> pack.Batch:
    """Return a batch of documents, with the loss on each token.

    Args:
        documents: the tokens of each document.
        rows: the indices of the documents in each row.
        device: where the batch is.
    """
    tokens = np.concatenate(documents).astype(np.int32)
    offsets = np.cumsum([0, *(len(document) for document in documents)])
    split = dataset.Split(tokens, np.ones(len(tokens), bool), offsets)
    return pack.collate(split, rows, pad_id=0).to(device)
