"""Standalone models: merges an adapter into its base, and saves unsharded models."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer import artifacts, origin
from finetune_trainer.cache import Cache
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model import load
from finetune_trainer.train.model.new_tokens import NO_TOKENS, NewTokens

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World

_GENERATION = "generation_config.json"
# A proxied upload above 5 GB does not get through.
_MAX_SHARD = "4GB"


def fetch(
    spec: Model, to: Path, world: World, field: str = "model.base", *, named: bool = False
) -> artifacts.Source:
    """Fetch a model into each pod as a standalone model: an adapter is merged into its base, unless it goes on itself.

    Args:
        spec: which model.
        to: folder for what is downloaded and merged.
        world: the ranks; all of them must call this, and the first of each pod does the work.
        field: the recipe's field that names it.
        named: whether an adapter is to name its base, so that rank 0 needs the digest of a base that lies elsewhere.

    Raises:
        RecipeRefusedError: it cannot be fetched, loaded or merged.
        TrainingError: the Hub does not answer.
    """

    def alone() -> artifacts.Source:
        source = artifacts.fetch(
            spec.base, to / "fetched", revision=spec.revision, cache=Cache.of(spec), field=field
        )
        if spec.adapter == "Continue":
            if source.adapter is None:
                raise RecipeRefusedError(
                    f"{field} {spec.base} is no adapter, and model.adapter Continue trains one further: remove it",
                    reason="ModelNotLoadable",
                )
            world.say(f"{field} {spec.base} is an adapter of {source.adapter_of}, which is trained further")
            return source
        if source.adapter is None:
            return source
        merged = to / "merged"
        into(source.base, source.adapter, spec, merged, field)
        world.say(f"{field} {spec.base} is an adapter: merged into its base {source.adapter_of}")
        return artifacts.Source(merged, source.tokenizer)

    def known() -> artifacts.Source:
        source = alone()
        found = source.origin
        if not (named and world.leads) or found is None or found.digest is not None:
            return source
        return replace(source, origin=replace(found, digest=origin.digest(source.base)))

    return world.agree_in_pod(known)


def into(
    base: Path, adapter: Path, spec: Model, to: Path, field: str = "model.base", *, new: NewTokens = NO_TOKENS
) -> None:
    """Merge an adapter into its base and save the result, in the type that the base is stored in.

    NB: peft keeps adapters in fp32 and adds each layer's product to the base's weights in place, so that the sum is
    rounded once: an fp32 copy of the base, twice as large, would give the same numbers.

    A base whose embedding and output layer share a weight has one for each of them afterwards, if the adapter tells them apart.

    Args:
        base: folder of the base.
        adapter: folder of the adapter.
        spec: the model, for error messages.
        to: where the merged model is saved.
        field: the recipe's field that names it.
        new: tokens that the adapter was trained with, and the base does not have.

    Raises:
        RecipeRefusedError: one of them cannot be loaded, or the adapter is virtual tokens, which no weights hold.
    """
    import peft

    with load.load_errors(spec, field):
        config = peft.PeftConfig.from_pretrained(str(adapter))
        if config.is_prompt_learning:
            raise RecipeRefusedError(
                f"{field} {spec.base} is a {config.peft_type.value} adapter, which cannot be merged into its base: "
                f"name the base, {config.base_model_name_or_path}",
                reason="ModelNotLoadable",
            )
        model = load.unsharded(spec, base)
        new.enlarge(model)
        adapted = on(model, adapter)
    _untie_adapted(adapted.get_base_model())
    # NB: peft sets tie_word_embeddings False where both ends have weights of their own.
    save(adapted.merge_and_unload(), to, base)


def _untie_adapted(model: Any) -> None:
    """Give embedding and output layer weights of their own if one of them has an adapter, which would be added to both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if not any(isinstance(end, BaseTunerLayer) for end in ends):
        return
    embedding, head = (
        end.get_base_layer() if isinstance(end, BaseTunerLayer) else getattr(end, "original_module", end)
        for end in ends
    )
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def on(model: Any, adapter: Path) -> Any:
    """A model with an adapter on it.

    Raises:
        ValueError: the adapter is of another model.
    """
    import peft

    with warnings.catch_warnings():
        # NB: peft goes on without what is missing, and the layer would be merged as if it had not been trained.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return peft.PeftModel.from_pretrained(model, str(adapter))
        except (RuntimeError, UserWarning) as error:
            # torch lists under a headline which shapes differ.
            detail = str(error).strip().splitlines()[:2][-1].strip()
            raise ValueError(f"the adapter does not fit its base: {detail[:300]}") from error


def save(model: Any, folder: Path, source: Path, **options: Any) -> None:
    """Save a model in shards, with the generation config of its base.

    Args:
        model: a model of transformers.
        folder: where to.
        source: folder of the base.
        options: more of them for `save_pretrained`.
    """
    from transformers import GenerationConfig

    # NB: transformers refuses to write some of the generation configs that it reads.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, max_shard_size=_MAX_SHARD, **options)
    given = source / _GENERATION
    if given.exists():
        shutil.copyfile(given, folder / _GENERATION)
