"""Merges an adapter into its base."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.models import base_reference, download
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.adapters import continued
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens
from finetune_trainer.train.model.network import family, task
from finetune_trainer.train.model.weights import load, stored_tensors
from finetune_trainer.train.model.weights.standalone import Standalone, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World


def fetch(
    spec: Model,
    directory: Path,
    world: World,
    field: str = "model.base",
    *,
    with_digest: bool = False,
    check: Callable[[Path], None] = lambda _config: None,
) -> download.Source:
    """Fetch a model into each pod as a standalone model: an adapter is merged into its base, unless its training continues.

    Args:
        spec: which model.
        directory: folder for downloaded and merged models.
        world: the ranks; all of them must call this, and the first of each pod does the work.
        field: the recipe's field that names the model.
        with_digest: whether rank 0 computes the digest of a base that has none: the exported adapter records it.
        check: checks the folder of the base's config before the weights are fetched.

    Raises:
        RecipeRefusedError: the model cannot be fetched, loaded or merged.
        TrainingError: the Hub does not answer.
    """

    def fetch_source() -> download.Source:
        options: dict[str, Any] = {"revision": spec.revision, "cache": Cache.of(spec), "field": field}
        # The config is fetched and checked first, since the weights may be hundreds of GB.
        config = download.fetch(spec.base, directory / "config", **options, without_weights=True)
        _check_base(spec, config, field)
        check(config.base)
        source = download.fetch(spec.base, directory / "fetched", **options)
        if spec.adapter == "Continue":
            if source.adapter is None:
                raise RecipeRefusedError(
                    f"{field} {spec.base} is not an adapter, which model.adapter Continue requires: remove model.adapter",
                    reason="ModelNotLoadable",
                )
            world.say(f"{field} {spec.base} is an adapter of {source.adapter_of}: training continues from it")
            return source
        if source.adapter is None:
            return source
        merged = directory / "merged"
        merge_into_base(source.base, source.adapter, spec, merged, field)
        world.say(f"{field} {spec.base} is an adapter: merged into its base {source.adapter_of}")
        return download.Source(merged, source.tokenizer)

    def fetch_with_digest() -> download.Source:
        source = fetch_source()
        origin = source.origin
        if with_digest and world.leads and origin is not None and origin.digest is None:
            digest = base_reference.compute_digest(source.base)
            return replace(source, origin=replace(origin, digest=digest))
        return source

    return world.agree_in_pod(fetch_with_digest)


def _check_base(spec: Model, source: download.Source, field: str) -> None:
    """Check by its config that a model, or the base of an adapter, can be trained."""
    from transformers import AutoConfig

    subject = f"{field} {spec.base}"
    if source.adapter is not None:
        subject = f"{source.adapter_of or source.base}, the base of {subject},"
    with load.load_errors(spec, field):
        config = AutoConfig.from_pretrained(str(source.base), trust_remote_code=spec.trust_remote_code)
        load.check_not_quantized(config, subject)
        family.check_causal(config, subject)


def merge_into_base(
    base: Path,
    adapter: Path,
    spec: Model,
    directory: Path,
    field: str = "model.base",
    *,
    new_tokens: NewTokens = NO_TOKENS,
) -> None:
    """Merge an adapter into its base and save the result, in the type that the base is stored in.

    The host holds one file of weights and the adapter, or the whole base if `_needs_whole_base`.

    NB: peft keeps adapters in fp32 and adds each layer's product to the base's weights in place, so that the sum is
    rounded once: an fp32 copy of the base, twice as large, would give the same numbers.

    If the adapter changes only one of an embedding and an output layer that share a weight, the merged model has a weight for each.

    Args:
        base: folder of the base.
        adapter: folder of the adapter.
        spec: the model, for error messages.
        directory: where the merged model is saved.
        field: the recipe's field that names the model.
        new_tokens: tokens of the adapter that the base does not have.

    Raises:
        RecipeRefusedError: the base or the adapter cannot be loaded, or the adapter consists of virtual tokens, which cannot be merged.
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
        model_task = _find_task(config, spec, base)
        if _needs_whole_base(config, base):
            model = load.load_unsharded(spec, base, model_task=model_task)
            new_tokens.enlarge(model)
            adapted = load_adapter(model, adapter)
            _untie_adapted(adapted.get_base_model(), _clone_parameter)
            # NB: peft sets tie_word_embeddings to False if the embedding and the output layer have separate weights.
            merged = adapted.merge_and_unload()
            streamed = None
        else:
            streamed = Standalone(
                spec,
                base,
                new_tokens=new_tokens,
                adapter_names=_find_replaced_weights(adapter, config),
                model_task=model_task,
            )
            adapted = load_adapter(streamed.model, adapter)
            _untie_adapted(adapted.get_base_model(), streamed.clone_parameter)
            streamed.unload(adapted)
    # Errors of saving are not errors of the model.
    if streamed is None:
        save(merged, directory, base)
    else:
        streamed.save(directory)


def _find_task(config: Any, spec: Model, base: Path) -> task.Task:
    """Return the task of an adapter on its base: a reward model if the adapter or the base is one."""
    is_reward_model = "RewardModel" in (task.of_adapter(config), load.read_task(spec, base))
    return "RewardModel" if is_reward_model else "LanguageModel"


def copy_base(base: Path, spec: Model, directory: Path, field: str = "model.base") -> None:
    """Save an unchanged base, in the dtype of its config; the host holds one file of weights, or the whole base if it is stored in pickles.

    Args:
        base: folder of the base.
        spec: the model, for error messages.
        directory: where the copy is saved.
        field: the recipe's field that names the model.

    Raises:
        RecipeRefusedError: the base cannot be loaded.
    """
    model, streamed = None, None
    with load.load_errors(spec, field):
        if stored_tensors.has_safetensors(base):
            streamed = Standalone(spec, base)
        else:
            model = load.load_unsharded(spec, base)
    if streamed is None:
        save(model, directory, base)
    else:
        streamed.save(directory)


def _needs_whole_base(config: Any, base: Path) -> bool:
    """Whether an adapter can only be merged into a base that is in memory.

    True for a base that `stored_tensors` cannot read, and for an adapter that is not LoRA, or whose layers are computed from the
    weights of the base (PiSSA, OLoRA, CorDA and others): peft needs the weights when it adds the layers.
    """
    import peft

    is_independent_of_base = (
        isinstance(config, peft.LoraConfig)
        and config.init_lora_weights in continued.INITIALIZATIONS_KEEPING_BASE
    )
    return not is_independent_of_base or not stored_tensors.has_safetensors(base)


def _find_replaced_weights(adapter: Path, config: Any) -> frozenset[str]:
    """Return the names of base weights that an adapter's file replaces: biases, and an extended embedding."""
    from peft.utils import load_peft_weights

    names = (
        name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for name in load_peft_weights(str(adapter), device="cpu")
    )
    # Layers of modulesToSave are copies, and do not replace the layers of the base.
    copied = tuple(config.modules_to_save or ())
    # The names of low-rank weights remain, but no weight of the base has such a name.
    return frozenset(name for name in names if not name.rpartition(".")[0].endswith(copied))


def _clone_parameter(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach().clone(), requires_grad=False)


def _untie_adapted(model: Any, clone: Callable[[torch.nn.Parameter], torch.nn.Parameter]) -> None:
    """Untie the embedding and the output layer if one of them has an adapter, which would be added to both.

    Args:
        model: the base, with the adapter on it.
        clone: returns a copy of a weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    def find_base_layer(end: Any) -> Any:
        # The original of a layer of modulesToSave is `original_module`.
        is_adapted = isinstance(end, BaseTunerLayer)
        return end.get_base_layer() if is_adapted else getattr(end, "original_module", end)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, BaseTunerLayer) and not isinstance(head, BaseTunerLayer):
        return
    base_embedding, base_head = find_base_layer(embedding), find_base_layer(head)
    if base_head.weight is base_embedding.weight:
        base_head.weight = clone(base_head.weight)


def load_adapter(model: Any, adapter: Path) -> Any:
    """Load an adapter onto a model.

    Raises:
        ValueError: the adapter is of another model.
    """
    import peft

    with warnings.catch_warnings():
        # NB: peft only warns about missing weights, and would merge the layer as if it had not been trained.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return peft.PeftModel.from_pretrained(model, str(adapter))
        except (RuntimeError, UserWarning) as error:
            # The message of torch is a headline and a line for each difference; peft's warning is one line.
            lines = str(error).strip().splitlines()
            detail = (lines[1] if len(lines) > 1 else lines[0]).strip()
            raise ValueError(f"the adapter does not fit its base: {detail[:300]}") from error
