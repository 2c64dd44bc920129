"""Networks as the trainer builds them, in this process or on several ranks, without a pod."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

# What peft and bitsandbytes say of themselves.
PEFT_WARNINGS = (
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:.*_check_is_size will be removed:FutureWarning",
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
)
_RANKS_A_POD = 2


def recipe(
    base: Path,
    *,
    method: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    strategy: str = "FSDP",
    **training: Any,
) -> Recipe:
    """A recipe for a base in a folder, in fp32 and of 64 tokens at most where `training` says nothing else."""
    from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
    from finetune_crds.recipe import Recipe

    objective = objective or {"type": "SFT"}
    columns = {"type": COLUMNS_OF_OBJECTIVE.get(objective["type"], "Text")}
    return Recipe.model_validate(
        {
            "job": {"name": "tiny", "namespace": "tests", "uid": "0123456789abcdef"},
            "model": {"base": str(base)},
            "method": method or {"type": "Full"},
            "objective": objective,
            "data": {"columns": columns, "splits": {"type": "Delta", "path": "/splits"}},
            "training": {"maxLength": 64, "precision": "FP32", **training},
            "distributed": {"strategy": strategy},
        }
    )


def random_split(*, documents: int = 1, examples: int = 16, vocabulary: int = 280, seed: int = 0) -> Split:
    """Examples of random tokens, of 5 to 29 tokens a document, with the loss on some of them; those of two have labels."""
    from finetune_trainer.train.data.dataset import Split

    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(5, 30, examples * documents))])
    tokens = draw.integers(2, vocabulary, offsets[-1]).astype(np.int32)
    loss_mask = draw.random(offsets[-1]) < 0.7
    labels = draw.random(examples) < 0.5 if documents == 2 else None
    return Split(tokens, loss_mask, offsets, documents, labels=labels)


def of_documents(*documents: list[int]) -> Split:
    """A split of documents with the loss on each token."""
    from finetune_trainer.train.data.dataset import Split

    tokens = np.array([token for document in documents for token in document], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    return Split(tokens, np.ones(len(tokens), bool), offsets)


def build(made_of: Recipe, base: Path, world: World) -> Network:
    """The network of a recipe, as the worker builds it."""
    from finetune_trainer.examples.tokenizer import load_tokenizer
    from finetune_trainer.train import build as trainer_build

    return trainer_build.build_network(
        made_of, base, load_tokenizer(made_of.model, base), world, base / "teacher"
    )


@contextmanager
def alone() -> Iterator[World]:
    """A process group of this process."""
    from finetune_trainer.train.runtime.distributed import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, 0, 1, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def on_ranks(size: int, rendezvous: Path, work: Callable[[World, Any], None], argument: Any = None) -> None:
    """Run `work` on `size` ranks, two a pod, each in a process of its own.

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them failed.
    """
    from torch.multiprocessing.spawn import start_processes

    from support.forks import preloaded

    preloaded()
    start_processes(_rank, (size, str(rendezvous), work, argument), nprocs=size, start_method="forkserver")


def _rank(rank: int, size: int, rendezvous: str, work: Callable[[World, Any], None], argument: Any) -> None:
    from finetune_trainer.train.runtime.distributed import World

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    pod = min(_RANKS_A_POD, size)
    try:
        work(World(rank, size, rank % pod, pod, torch.device("cpu")), argument)
    finally:
        dist.destroy_process_group()


def small_llama(width: int = 128) -> Any:
    """A Llama of twelve layers, of this width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
