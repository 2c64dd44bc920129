"""The weights of a sharded model: those of the base from its files, those of the method from the seed or from an adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from finetune_crds.training import SoftPrompt
from finetune_trainer.train.model import rows
from finetune_trainer.train.model.adapters import adapt, continued, new_tokens
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens
from finetune_trainer.train.model.network.trained_network import base_of
from finetune_trainer.train.model.weights import stored_tensors
from finetune_trainer.train.model.weights.load import empty, load_errors, unsharded

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World

# What peft adds to the names of a base's weights.
_WRAPPED = re.compile(
    r"\.(token_adapter\.base_layer|base_layer|original_module|modules_to_save\.default)(?=\.)"
)
_ADDED = (".lora_", ".trainable_tokens_")


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
    materialize(model, world.device)
    if recipe.method.type != "QLoRA":
        read_weights(model, recipe.model, source, world, new=NewTokens.of(recipe.model, tokenizer))
    if recipe.model.new_tokens:
        new_tokens.start(model)
    if adapter is not None:
        world.agree(lambda: _read_adapter(model, recipe, adapter))
        return
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".lora_A.", ".lora_B.", "prompt_encoder.")):
            rows.set_rows(parameter, adapt.initial(name, parameter.shape, recipe.training.seed))
    if recipe.method.type == "DoRA":
        _set_magnitudes(model)
    if recipe.method.type == "PromptTuning":
        words = adapt.prompt_tokens(
            recipe.method.soft_prompt or SoftPrompt(), tokenizer, recipe.training.seed
        )
        _initialize_prompt(model, words)


def _read_adapter(model: nn.Module, recipe: Recipe, adapter: Path) -> None:
    with load_errors(recipe.model):
        for parameter, values in continued.weights(model, adapter, recipe).values():
            rows.set_rows(parameter, values)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device on the device, and move the others there."""
    model._apply(  # noqa: SLF001 - as nn.Module.to_empty does, which would empty the buffers too
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def read_weights(
    model: nn.Module,
    spec: Model,
    source: Path,
    world: World,
    field: str = "model.base",
    *,
    new: NewTokens = NO_TOKENS,
) -> None:
    """Read a model's weights into its parameters; each rank reads the rows that it holds.

    Where the files name the weights differently, or hold each expert by itself, a rank reads what its rows are made of. Rank 0 loads
    all of a pickle, of which no rows can be read, and broadcasts them.

    Raises:
        RecipeRefusedError: files are missing, damaged, or of another model.
    """
    wanted = _of_base(model, new)

    def try_to_read() -> bool:
        with load_errors(spec, field):
            if not stored_tensors.readable(source):
                return False
            for name in _read_parts(wanted, _parts(wanted, spec, source)):
                world.say(f"{field}: its files have no {name}: it begins as in the model's code")
            return True

    if not world.agree(try_to_read):
        world.say(f"{field}: its weights are in pickles; rank 0 loads all of them")
        _broadcast(wanted, spec, source, world, field)


@dataclass(frozen=True)
class _Wanted:
    """What gets a weight of the base's files.

    tensors: of one shape. A layer of modulesToSave has two: as it was, and as it is trained.
    new: tokens that the weight gets rows for.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    new: NewTokens = NO_TOKENS

    @property
    def is_buffer(self) -> bool:
        """Whether it has a value from the model's code, as a skeleton's buffers do."""
        return not isinstance(self.tensors[0], nn.Parameter)

    @property
    def shape(self) -> list[int]:
        return list(self.tensors[0].shape)

    def whole(self, part: Any) -> Any:
        """A tensor, or a slice of a file, with the rows of new tokens."""
        return new_tokens.Grown(part, self.new) if self.new.ids else part

    def set(self, value: Any) -> None:
        for tensor in self.tensors:
            rows.set_rows(tensor, value)


def _of_base(model: nn.Module, new: NewTokens) -> dict[str, _Wanted]:
    """The tensors of the base model that files hold, by their name there; without what a method added.

    These are the parameters, and buffers such as a router's score corrections.
    """
    base = base_of(model)
    ends = {id(weight) for weight in new_tokens.at_ends(base)}
    found: dict[str, _Wanted] = {}
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        # A tied weight has only its first name, as in the files.
        if id(tensor) not in seen and not any(part in name for part in _ADDED):
            seen.add(id(tensor))
            to = _Wanted(new=new if id(tensor) in ends else NO_TOKENS)
            found.setdefault(_WRAPPED.sub("", name), to).tensors.append(tensor)
    return found


def _parts(wanted: Collection[str], spec: Model, source: Path) -> dict[str, stored_tensors.Part]:
    """What the files hold, by the names of the model's weights, file by file."""
    there: dict[str, stored_tensors.Part] = dict(stored_tensors.tensors(source))
    if set(wanted) <= set(there):
        return there
    from transformers import AutoConfig

    trust = spec.trust_remote_code
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust)
    # NB: the model itself has the names of peft and FSDP, where transformers looks for those of its own.
    return stored_tensors.layout(empty(config, torch.float32, trust=trust), there).parts


def _read_parts(wanted: dict[str, _Wanted], there: dict[str, stored_tensors.Part]) -> list[str]:
    """Read each rank's rows; DCP's HuggingFaceStorageReader is no faster (docs/design/speed.md).

    Returns:
        The buffers that the files lack, which transformers leaves as they are too.
    """
    missing = [name for name in wanted if name not in there]
    for name in missing:
        if not wanted[name].is_buffer:
            raise ValueError(f"its files have no {name} of the shape {wanted[name].shape}")
    for name, part in there.items():
        if name not in wanted:
            continue
        to = wanted[name]
        whole = to.whole(part)
        shape = new_tokens.shape_of(whole)
        if shape != to.shape:
            where = part.path.name if isinstance(part, stored_tensors.Stored) else "its files"
            raise ValueError(f"{name} has the shape {shape} in {where}, and {to.shape} by config.json")
        to.set(whole)
    return missing


def _broadcast(wanted: dict[str, _Wanted], spec: Model, source: Path, world: World, field: str) -> None:

    def load() -> dict[str, torch.Tensor]:
        if not world.leads:
            return {}
        with load_errors(spec, field):
            model = unsharded(spec, source)
            own = next((name for name, _ in model.named_parameters() if name not in wanted), None)
            if own is not None:
                # NB: transformers does not tie weights of which files have different values.
                raise ValueError(
                    f"its files have a {own} of its own, which its config.json ties to another weight: set tie_word_embeddings to "
                    "false there"
                )
            state = dict(model.state_dict())
            found = {name: to.whole(state[name])[:] for name, to in wanted.items() if name in state}
            for name, to in wanted.items():
                if name not in found or list(found[name].shape) != to.shape:
                    raise ValueError(f"its files have no {name} of the shape {to.shape}")
            return found

    weights = world.agree(load)
    for name, to in wanted.items():
        # Of a layer and its trained copy in fp32, the latter.
        dtype = max((tensor.dtype for tensor in to.tensors), key=lambda kind: kind.itemsize)
        value = weights[name].to(dtype) if world.leads else torch.empty(to.shape, dtype=dtype)
        dist.broadcast(value, src=0)
        to.set(value)


def _set_magnitudes(model: nn.Module) -> None:
    """Initialize DoRA's magnitudes: the norm of the weights of each output (Liu et al., arXiv:2402.09353, equation 2)."""
    parameters = dict(model.named_parameters())
    for name, magnitude in parameters.items():
        if ".lora_magnitude_vector." not in name:
            continue
        layer: Any = model.get_submodule(name.split(".lora_magnitude_vector.")[0])
        base = layer.base_layer.weight
        with torch.no_grad():
            if layer.fan_in_fan_out:
                # A Conv1D has an output in each column, of which a rank holds some rows.
                rows.set_rows(magnitude, rows.whole(base).float().norm(dim=0))
            else:
                # A rank holds the same rows of both.
                rows.local_rows(magnitude)[0].copy_(rows.local_rows(base)[0].float().norm(dim=1))


def _initialize_prompt(model: nn.Module, words: torch.Tensor) -> None:
    prompt = next(parameter for name, parameter in model.named_parameters() if "prompt_encoder." in name)
    embedding = base_of(model).get_input_embeddings().weight
    whole_embedding = rows.whole(embedding).detach()
    chosen = whole_embedding[words.to(whole_embedding.device)].float()
    rows.set_rows(prompt, chosen)
