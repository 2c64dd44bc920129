"""The models of an evaluation: the registered version and its base, one at a time in memory."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.examples.stop_tokens import read_stop_tokens
from finetune_trainer.models import download
from finetune_trainer.models.cache import Cache
from finetune_trainer.train.delivery import export
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens
from finetune_trainer.train.model.checks import parity
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.weights import load, merge, score_head
from finetune_trainer.train.objectives.sft import Sft

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.models.download import Source

VERSION, BASE = "the version", "model.base"
"""The names of the two models in messages."""
# What to do if a model cannot be evaluated here, and if it overflows in FP16.
_REMEDY = "evaluate it with a command of your own, evaluation.command"
_OVERFLOW = (
    "request in spec.pods.evaluate.template a GPU of compute capability 8.0 or higher, which computes in BF16, or train with "
    "training.precision FP32"
)


@dataclass(frozen=True)
class ScoreHead:
    """What a reward model has in addition to its files.

    seed: training.seed, with which the score head of a language model was initialized.
    pad_id: the padding token.
    """

    seed: int
    pad_id: int


def choose_device(recipe: Recipe) -> torch.device:
    """Return the first GPU that the pod sees, or its CPUs if it sees none or the training runs on CPUs."""
    gpu = torch.cuda.is_available() and recipe.distributed.device != "CPU"
    return torch.device("cuda", 0) if gpu else torch.device("cpu")


def build_version_spec(recipe: Recipe, uri: str) -> Model:
    """Return the recipe's model with the version as its base, and without new tokens, which the version already has."""
    return recipe.model.model_copy(update={"base": uri, "revision": None, "new_tokens": []})


def fetch_version(recipe: Recipe, uri: str, to: Path) -> Source:
    """Fetch a registered version into the pod.

    Raises:
        RecipeRefusedError: the version does not exist, or its base is gone or has changed.
    """
    # With an external base, the cache keeps that base for other versions. A full version is fetched once, and would only fill the cache.
    cache = Cache.of(recipe.model) if export.has_external_base(recipe) else None
    return download.fetch(uri, to, cache=cache, field=VERSION)


def fetch_base(recipe: Recipe, version: Source, to: Path) -> Source:
    """Fetch the model that the version was trained from.

    If `model.base` is an adapter, it is fetched with its own base, and not merged, except that the adapter of a language model is merged
    for a reward model. After Merge, a version that is an adapter has the merged model as its base, so that base is used instead.

    Args:
        recipe: names the model.
        version: the trained version; the base of an adapter is fetched with it.
        to: folder for the download.

    Raises:
        RecipeRefusedError: the model does not exist, or access is denied.
        TrainingError: the Hub does not answer.
    """
    spec = recipe.model
    # With Merge, training began with the base of the version's adapter. NB: with Continue, it began with the adapter in spec.base.
    if version.adapter is not None and spec.adapter == "Merge":
        return replace(version, adapter=None)
    source = download.fetch(spec.base, to, revision=spec.revision, cache=Cache.of(spec))
    if source.adapter is not None and task.of_recipe(recipe) == "RewardModel" and spec.adapter == "Merge":
        merged = to / "merged"
        merge.merge_into_base(source.base, source.adapter, spec, merged)
        return replace(source, base=merged, adapter=None)
    return source


@contextmanager
def load_model(
    source: Source,
    spec: Model,
    field: str,
    device: torch.device,
    new: NewTokens = NO_TOKENS,
    *,
    dtype: torch.dtype,
    score: ScoreHead | None = None,
) -> Iterator[Network]:
    """Yield a model with its adapter, and free its memory at the end.

    Args:
        source: the folders of the model.
        spec: the address of the model, for errors, and whether its own code may run.
        field: how messages name the model.
        device: where the model computes.
        new: the new tokens; the model gets the same embedding rows for them as before the first step of the training.
        dtype: type of the computation.
        score: of a reward model; None: the model is a language model.

    Raises:
        RecipeRefusedError: the model cannot be loaded, or its logits are wrong (`parity.check`).
    """
    network = Network(_load_weights(source, spec, field, device, new, dtype=dtype, score=score), Sft()).eval()
    overflow = _OVERFLOW if dtype == torch.float16 else None
    try:
        subject = parity.Subject(spec.base, field, remedy=_REMEDY, overflow_remedy=overflow)
        parity.check(network, device, subject)
        yield network
    finally:
        network.model = torch.nn.Identity()
        # NB: the output layer may be tied to the embedding, and would keep the embedding in memory.
        del network.head.layer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _load_weights(
    source: Source,
    spec: Model,
    field: str,
    device: torch.device,
    new: NewTokens,
    *,
    dtype: torch.dtype,
    score: ScoreHead | None,
) -> torch.nn.Module:
    """Load a model with its adapter and with rows for the new tokens; no weight gets a gradient."""
    model_task: task.Task = "LanguageModel" if score is None else "RewardModel"
    with load.load_errors(spec, field):
        model: Any = task.get_auto_class(model_task).from_pretrained(
            str(source.base),
            trust_remote_code=spec.trust_remote_code,
            dtype=dtype,
            device_map={"": device} if device.type == "cuda" else None,
            **task.build_load_options(model_task),
        )
        if score is not None:
            task.set_padding(model, score.pad_id)
            score_head.initialize_if_new(model, spec, source.base, score.seed)
        if source.adapter is not None:
            model = merge.load_adapter(model, source.adapter)
        if new.ids:
            # Rows are added to a plain model, so its adapter is merged first.
            model = model.merge_and_unload() if source.adapter is not None else model
            new.enlarge(model)
    weights: torch.nn.Module = model.to(device).requires_grad_(False)
    return weights


def read_stops(source: Source, spec: Model, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that end a text: the tokenizer's end of text, and those in the files of the model."""
    stops = read_stop_tokens(source.base, source.adapter, trust_remote_code=spec.trust_remote_code)
    return frozenset((*stops, int(tokenizer.eos_token_id)))
