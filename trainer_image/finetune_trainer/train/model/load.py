"""The base model: first a skeleton without weights, then each rank reads its shards of them."""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from finetune_crds.training import COLUMNS_OF_OBJECTIVE, SOFT_PROMPTS, Quantization, SoftPrompt
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model import adapt, attention, continued
from finetune_trainer.train.model.network import base_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


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
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeRefusedError(
            f"{field} {model.base} cannot be loaded: {first_line}", reason="ModelNotLoadable"
        ) from error


def skeleton(recipe: Recipe, source: Path, world: World, field: str = "model.base") -> PreTrainedModel:
    """The base model with its parameters on the meta device.

    Parameters that are trained are fp32; frozen ones have the precision they compute in.

    Raises:
        RecipeRefusedError: it cannot be loaded, or its context is shorter than training.maxLength.
    """
    from transformers import AutoConfig

    half = recipe.training.precision == "BF16"
    soft = recipe.method.type in SOFT_PROMPTS
    with load_errors(recipe.model, field):
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=recipe.model.trust_remote_code)
        _check_context(config, recipe, field)
        dtype = torch.bfloat16 if half and recipe.method.type != "Full" else torch.float32
        model = empty(config, dtype, trust=recipe.model.trust_remote_code)
    isolated = attention.isolate(model, cuda=world.device.type == "cuda", half=half, soft_prompt=soft)
    _check_documents(model, recipe, field, apart=isolated or attention.masks_documents(model))
    return model


def empty(config: Any, dtype: torch.dtype, *, trust: bool) -> PreTrainedModel:
    """A model with parameters on the meta device, and real buffers, which the files do not hold."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    # NB: parameters that are created on the meta device are not tied.
    model.tie_weights()
    return model


def unsharded(spec: Model, source: Path) -> PreTrainedModel:
    """A model with all weights, in the type that they are stored in, on the host.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(source), trust_remote_code=spec.trust_remote_code, dtype="auto"
    )


def quantised(recipe: Recipe, source: Path, world: World, like: PreTrainedModel) -> PreTrainedModel:
    """The base model in four bits, unsharded on each rank's device.

    Args:
        recipe: one with method QLoRA.
        source: folder of the base model.
        world: which rank this is.
        like: its skeleton, whose attention implementation it uses.

    Raises:
        RecipeRefusedError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = recipe.method.quantization or Quantization()
    compute = torch.bfloat16 if recipe.training.precision == "BF16" else torch.float32
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type.lower(),
        bnb_4bit_use_double_quant=quantization.double_quantization,
        bnb_4bit_compute_dtype=compute,
    )
    with load_errors(recipe.model):
        model = AutoModelForCausalLM.from_pretrained(
            str(source),
            trust_remote_code=recipe.model.trust_remote_code,
            dtype=compute,
            attn_implementation=like.config._attn_implementation,  # noqa: SLF001 - where transformers keeps it
            device_map={"": world.device},
            quantization_config=four_bits,
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # NB: bitsandbytes would repack the weights in the first evaluation, and fails for some shapes.
            module.support_avx512bf16_for_cpu = False
    return model.requires_grad_(False)


def _check_context(config: Any, recipe: Recipe, field: str) -> None:
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and recipe.training.max_length > context:
        raise RecipeRefusedError(
            f"training.maxLength {recipe.training.max_length} is above the {context} tokens that {field} "
            f"{recipe.model.base} can take: lower it"
        )


def _check_documents(model: PreTrainedModel, recipe: Recipe, field: str, *, apart: bool) -> None:
    training = recipe.training
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise RecipeRefusedError(
            f"{field} {recipe.model.base} is a {model.config.model_type}, which takes no position ids, so its documents "
            "cannot be kept apart: choose another model",
            reason="ModelNotLoadable",
        )
    pairs = recipe.objective.type in COLUMNS_OF_OBJECTIVE
    if (training.packing or pairs) and not apart:
        remedy = "choose another model" if pairs else "set training.packing to false"
        raise RecipeRefusedError(
            f"{field} {recipe.model.base} is a {model.config.model_type}, whose layers mix the documents of a row: "
            f"{remedy}",
            reason="ModelNotLoadable",
        )


def fill(
    model: nn.Module,
    recipe: Recipe,
    source: Path,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    *,
    adapter: Path | None = None,
) -> None:
    """Allocate a sharded model and set its values: the base's from files, the method's from the seed or from an adapter.

    Raises:
        RecipeRefusedError: files are missing, damaged, or of another model.
    """
    materialise(model, world.device)
    if recipe.method.type != "QLoRA":
        read_weights(model, recipe.model, source, world)
    if adapter is not None:
        world.agree(lambda: _read_adapter(model, recipe, adapter))
        return
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".lora_A.", ".lora_B.", "prompt_encoder.")):
            _set(parameter, adapt.initial(name, parameter.shape, recipe.training.seed))
    if recipe.method.type == "DoRA":
        _set_magnitudes(model)
    if recipe.method.type == "PromptTuning":
        words = adapt.prompt_tokens(
            recipe.method.soft_prompt or SoftPrompt(), tokenizer, recipe.training.seed
        )
        _initialise_prompt(model, words)


def _read_adapter(model: nn.Module, recipe: Recipe, adapter: Path) -> None:
    with load_errors(recipe.model):
        for parameter, values in continued.weights(model, adapter, recipe).values():
            _set(parameter, values)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device on the device, and move the others there."""
    model._apply(  # noqa: SLF001 - as nn.Module.to_empty does, which would empty the buffers too
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def read_weights(
    model: nn.Module, spec: Model, source: Path, world: World, field: str = "model.base"
) -> None:
    """Read a model's weights into its parameters; each rank reads the rows that it holds.

    If the files are not safetensors, or name the weights differently, rank 0 loads all of them and broadcasts them.

    Raises:
        RecipeRefusedError: files are missing, damaged, or of another model.
    """
    wanted = _of_base(model)

    def try_to_read() -> bool:
        with load_errors(spec, field):
            files = _files(source)
            if not set(wanted) <= set(files):
                return False
            _read_parts(wanted, files)
            return True

    if not world.agree(try_to_read):
        world.say(f"{field}: the files name the weights differently than the model; rank 0 loads all of them")
        _broadcast(wanted, spec, source, world, field)


def check_same_logits(rows: int, teacher_rows: int, base: str, teacher: str) -> None:
    """Compare the sizes of two output layers.

    Raises:
        RecipeRefusedError: they differ, so that the probabilities cannot be compared.
    """
    if rows != teacher_rows:
        raise RecipeRefusedError(
            f"objective.distillation.teacher {teacher} gives {teacher_rows} logits a token and model.base {base} "
            f"{rows}: choose a teacher of the same family",
            reason="VocabularyMismatch",
        )


def _of_base(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the base model that files hold, by their name there; without what a method added.

    These are the parameters, and buffers such as a router's score corrections.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in base_of(model).state_dict(keep_vars=True).items():
        # A tied weight has only its first name, as in the files.
        if ".lora_" not in name and not any(tensor is other for other in found.values()):
            found[name.replace(".base_layer.", ".")] = tensor
    return found


def _files(source: Path) -> dict[str, Path]:
    """The file of each weight."""
    from safetensors import safe_open

    if (source / _INDEX).exists():
        index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
        return {name: source / file for name, file in index["weight_map"].items()}
    if not (source / _SINGLE).exists():
        return {}
    with safe_open(source / _SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), source / _SINGLE)


def _read_parts(wanted: dict[str, torch.Tensor], files: dict[str, Path]) -> None:
    """Read each rank's rows; DCP's HuggingFaceStorageReader is no faster (docs/design/speed.md)."""
    from safetensors import safe_open

    for path in sorted({files[name] for name in wanted}):
        with safe_open(path, framework="pt") as file:
            for name, parameter in wanted.items():
                if files[name] != path:
                    continue
                part = file.get_slice(name)
                shape = torch.Size(part.get_shape())
                if shape != parameter.shape:
                    raise ValueError(
                        f"{name} has the shape {list(shape)} in {path.name}, and {list(parameter.shape)} by config.json"
                    )
                _set(parameter, part)


def _broadcast(wanted: dict[str, torch.Tensor], spec: Model, source: Path, world: World, field: str) -> None:

    def load() -> dict[str, torch.Tensor]:
        if not world.leads:
            return {}
        with load_errors(spec, field):
            found = dict(unsharded(spec, source).state_dict())
            for name, weight in wanted.items():
                if name not in found or found[name].shape != weight.shape:
                    raise ValueError(f"its files have no {name} of the shape {list(weight.shape)}")
            return found

    weights = world.agree(load)
    for name, weight in wanted.items():
        value = (
            weights[name].to(weight.dtype) if world.leads else torch.empty(weight.shape, dtype=weight.dtype)
        )
        dist.broadcast(value, src=0)
        _set(weight, value)


def _set(parameter: torch.Tensor, value: Any) -> None:
    """Copy this rank's rows of a value, a tensor or a slice of a file, into a parameter."""
    local, rows = _local(parameter)
    if local.numel():
        with torch.no_grad():
            local.copy_(value[rows])


def _local(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's shard of a parameter, and the rows that it covers."""
    if not isinstance(parameter, DTensor):
        return parameter, slice(None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = parameter.to_local()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    begin = offset[0] if offset else 0
    return local, slice(begin, begin + len(local))


def _set_magnitudes(model: nn.Module) -> None:
    """Initialise DoRA's magnitudes with the norms of the base's rows (Liu et al., arXiv:2402.09353, equation 2).

    A rank holds the same rows of both.
    """
    parameters = dict(model.named_parameters())
    for name, magnitude in parameters.items():
        if ".lora_magnitude_vector." in name:
            base = parameters[f"{name.split('.lora_magnitude_vector.')[0]}.base_layer.weight"]
            with torch.no_grad():
                _local(magnitude)[0].copy_(_local(base)[0].float().norm(dim=1))


def _initialise_prompt(model: nn.Module, words: torch.Tensor) -> None:
    prompt = next(parameter for name, parameter in model.named_parameters() if "prompt_encoder." in name)
    embedding = base_of(model).get_input_embeddings().weight
    whole_embedding = embedding.full_tensor() if isinstance(embedding, DTensor) else embedding
    chosen = whole_embedding.detach()[words.to(whole_embedding.device)].float()
    _set(prompt, chosen)
