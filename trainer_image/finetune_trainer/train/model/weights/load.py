"""Loads the base model: as a skeleton without weights, whose shards each rank fills (`fill`), or with all weights on one device."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.training import SOFT_PROMPT_METHODS, Quantization
from finetune_trainer.pod.exit_status import RecipeRefusedError, first_line
from finetune_trainer.train.model import precision
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens
from finetune_trainer.train.model.network import attention, dropout, task
from finetune_trainer.train.model.network.trained_network import decoder_of
from finetune_trainer.train.model.weights import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World


@contextmanager
def load_errors(model: Model, field: str = "model.base") -> Iterator[None]:
    """Turn the libraries' errors into an error about the recipe.

    Raises:
        RecipeRefusedError: the model cannot be loaded.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RecipeRefusedError(
            f"{field} {model.base} cannot be loaded: {first_line(error)}", reason="ModelNotLoadable"
        ) from error


def build_skeleton(recipe: Recipe, source: Path, world: World, field: str = "model.base") -> PreTrainedModel:
    """Build the base model with its parameters on the meta device.

    Trained parameters have the dtype of training.optimizer.weights; frozen parameters have the precision of the computation.
    For an objective that compares answers, dropout is removed.

    Raises:
        RecipeRefusedError: the model cannot be loaded, is stored quantized, its context is shorter than training.maxLength, or its forward pass
            is random although answers are compared.
    """
    from transformers import AutoConfig

    is_half = recipe.training.precision != "FP32"
    has_soft_prompt = recipe.method.type in SOFT_PROMPT_METHODS
    with load_errors(recipe.model, field):
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=recipe.model.trust_remote_code)
        subject = f"{field} {recipe.model.base}"
        check_not_quantized(config, subject)
        _check_context(config, recipe, field)
        model_task = task.of_recipe(recipe)
        task.configure(config, model_task, subject)
        build = partial(
            build_empty_model,
            config,
            precision.base_dtype(recipe),
            trust=recipe.model.trust_remote_code,
            model_task=model_task,
        )
        model = build()
        if _has_untied_values(model, source):
            config.tie_word_embeddings = False
            model = build()
        if model_task == "RewardModel":
            task.check_score_head(model, subject)
    if recipe.objective.type in COLUMNS_OF_OBJECTIVE:
        # NB: before the choice of attention, which depends on dropout.
        dropout.remove(model, f"{field} {recipe.model.base}")
    is_isolated = attention.isolate(model, card=world.card, half=is_half, soft_prompt=has_soft_prompt)
    _check_documents(model, recipe, field, can_separate=is_isolated or attention.can_mask_documents(model))
    return model


def _has_untied_values(model: PreTrainedModel, source: Path) -> bool:
    """Whether the files have different values for weights that the config ties: transformers then does not tie them."""
    if not model.all_tied_weights_keys or not stored_tensors.has_safetensors(source):
        return False
    parts = stored_tensors.map_layout(model, stored_tensors.open_tensors(source)).parts
    return any(
        not stored_tensors.is_equal(parts[name], parts[tied_name])
        for name, tied_name in stored_tensors.find_tied_duplicates(model, parts)
    )


def build_empty_model(
    config: Any, dtype: torch.dtype, *, trust: bool, model_task: task.Task = "LanguageModel"
) -> PreTrainedModel:
    """Build a model with parameters on the meta device and real buffers, because the files lack most buffers."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = task.get_auto_class(model_task).from_config(
            config, dtype=dtype, trust_remote_code=trust
        )
    # NB: parameters that are created on the meta device are not tied.
    model.tie_weights()
    # Only buffers: FSDP casts all parameters in each pass.
    is_fp32 = fp32_name_filter(model, dtype)
    for name, buffer in model.named_buffers():
        if is_fp32(name):
            buffer.data = buffer.data.float()
    return model


def fp32_name_filter(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate on names: whether transformers keeps the weight in fp32 in a model of another dtype, mainly router corrections."""
    from transformers.core_model_loading import build_glob_alternation

    dtype_plan = model._get_dtype_plan(dtype)  # noqa: SLF001 - as from_pretrained does
    if not dtype_plan:
        return lambda _name: False
    pattern, *_ = build_glob_alternation(list(dtype_plan))
    return lambda name: pattern.search(name) is not None


def load_unsharded(
    spec: Model, source: Path, device: str | None = None, *, model_task: task.Task | None = None
) -> PreTrainedModel:
    """Load a model with all weights, in their stored dtype; a score head that the files lack gets random values.

    Args:
        spec: the model.
        source: its folder.
        device: None: the host; `meta`: a model without values.
        model_task: the task; None: that of the architectures in its config.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: the model cannot be loaded.
    """
    if model_task is None:
        model_task = read_task(spec, source)
    model: PreTrainedModel = task.get_auto_class(model_task).from_pretrained(
        str(source),
        trust_remote_code=spec.trust_remote_code,
        dtype="auto",
        device_map=None if device is None else {"": device},
        **task.build_load_options(model_task),
    )
    return model


def read_task(spec: Model, source: Path) -> task.Task:
    """Return the task of the model in a folder.

    Raises:
        OSError, ValueError: the folder has no config that can be read.
    """
    from transformers import AutoConfig

    return task.of_config(AutoConfig.from_pretrained(str(source), trust_remote_code=spec.trust_remote_code))


def load_quantized(
    recipe: Recipe, source: Path, world: World, skeleton: PreTrainedModel, new_tokens: NewTokens = NO_TOKENS
) -> PreTrainedModel:
    """Load the base model in 4 bits, unsharded on each rank's device; dropout is removed as in `build_skeleton`.

    Args:
        recipe: a recipe with method QLoRA.
        source: folder of the base model.
        world: the ranks.
        skeleton: from `build_skeleton`: the result has the same attention implementation and tied weights.
        new_tokens: tokens that get rows.

    Raises:
        RecipeRefusedError: the base model cannot be loaded.
    """
    config, model_task = build_quantization_config(recipe), task.of_recipe(recipe)
    with load_errors(recipe.model):
        model = task.get_auto_class(model_task).from_pretrained(
            str(source),
            trust_remote_code=recipe.model.trust_remote_code,
            dtype=config.bnb_4bit_compute_dtype,
            attn_implementation=skeleton.config._attn_implementation,  # noqa: SLF001 - where transformers keeps it
            device_map={"": world.device},
            quantization_config=config,
            **task.build_load_options(model_task),
        )
    # NB: whether weights are tied follows from their values, as in the skeleton: the files' config may say otherwise.
    model.config.tie_word_embeddings = skeleton.config.tie_word_embeddings
    for module in model.modules():
        prevent_repacking(module)
    if recipe.objective.type in COLUMNS_OF_OBJECTIVE:
        dropout.remove(model)
    new_tokens.enlarge(model)
    frozen: PreTrainedModel = model.requires_grad_(False)
    return frozen


def build_quantization_config(recipe: Recipe) -> Any:
    """Build the configuration of transformers for a base in 4 bits."""
    from transformers import BitsAndBytesConfig

    quantization = recipe.method.quantization or Quantization()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type.lower(),
        bnb_4bit_use_double_quant=quantization.double_quantization,
        bnb_4bit_compute_dtype=precision.compute_dtype(recipe.training.precision),
    )


def prevent_repacking(module: Any) -> None:
    """Keep bitsandbytes from repacking a layer's weights in the first evaluation, which fails for some shapes."""
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False


def check_not_quantized(config: Any, subject: str) -> None:
    """Refuse quantized weights: they have no gradients, and an adapter cannot be added to them.

    NB: transformers loads some of them without an error (MXFP4 in BF16, bitsandbytes in 4 bits), and the exported model would then
    have a configuration that does not fit its weights.

    Args:
        config: of transformers.
        subject: the model, for the error message.

    Raises:
        RecipeRefusedError: the configuration has a quantization_config.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = (
            quantization.get("quant_method")
            if isinstance(quantization, dict)
            else getattr(quantization, "quant_method", None)
        )
        raise RecipeRefusedError(
            f"{subject} is stored quantized ({getattr(method, 'value', method) or 'by an unnamed method'}), and quantized "
            "weights cannot be trained: use the BF16 version of the model, which method QLoRA quantizes to 4 bits itself",
            reason="ModelNotLoadable",
        )


def _check_context(config: Any, recipe: Recipe, field: str) -> None:
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and recipe.training.max_length > context:
        raise RecipeRefusedError(
            f"training.maxLength {recipe.training.max_length} exceeds the context of {context} tokens of {field} "
            f"{recipe.model.base}: lower training.maxLength"
        )


def _check_documents(model: PreTrainedModel, recipe: Recipe, field: str, *, can_separate: bool) -> None:
    """Check that a model takes position ids and, if a row has several documents, keeps them apart; `can_separate`: whether its attention does."""
    training = recipe.training
    if "position_ids" not in inspect.signature(decoder_of(model).forward).parameters:
        raise RecipeRefusedError(
            f"{field} {recipe.model.base} is a {model.config.model_type}, which does not accept position ids, so the documents of a row "
            "cannot be kept apart: choose another model",
            reason="ModelNotLoadable",
        )
    is_preference = recipe.objective.type in COLUMNS_OF_OBJECTIVE
    if (training.packing or is_preference) and not can_separate:
        remedy = "choose another model" if is_preference else "set training.packing to false"
        raise RecipeRefusedError(
            f"{field} {recipe.model.base} is a {model.config.model_type}, whose layers mix the documents of a row: "
            f"{remedy}",
            reason="ModelNotLoadable",
        )


def check_same_logits(rows: int, teacher_rows: int, base: str, teacher: str) -> None:
    """Compare the sizes of two output layers.

    Raises:
        RecipeRefusedError: the sizes differ, so the probabilities cannot be compared.
    """
    if rows != teacher_rows:
        raise RecipeRefusedError(
            f"objective.distillation.teacher {teacher} computes {teacher_rows} logits per token, but model.base {base} computes "
            f"{rows}: choose a teacher of the same family",
            reason="VocabularyMismatch",
        )
