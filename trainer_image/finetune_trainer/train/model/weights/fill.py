"""Fills the weights of a sharded model: the base model's from its files, the method's from the seed or from an adapter."""

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
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import base_of, replace_tensor
from finetune_trainer.train.model.weights import score_head, stored_tensors
from finetune_trainer.train.model.weights.load import build_empty_model, load_errors, load_unsharded

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.train.runtime.distributed import World

# Parts that peft adds to the names of a base's weights.
_PEFT_WRAPPER = re.compile(
    r"\.(token_adapter\.base_layer|base_layer|original_module|modules_to_save\.default)(?=\.)"
)
# A parameter that peft adds has one of these in its name.
_PEFT_PARAMETERS = (".lora_", ".trainable_tokens_")


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
    # `load.load_quantized` loads a quantized base with its weights.
    if recipe.method.type != "QLoRA":
        read_weights(model, recipe.model, source, world, new=NewTokens.of(recipe.model, tokenizer))
    with load_errors(recipe.model):
        score_head.initialize_if_new(base_of(model), recipe.model, source, recipe.training.seed)
    if recipe.model.new_tokens:
        new_tokens.initialize_trained_rows(model)
    if adapter is not None:
        world.agree(lambda: _read_adapter(model, recipe, adapter))
        return
    # A `prompt_encoder` has a prefix, which keeps these values, or a prompt, which `_initialize_prompt` sets below.
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".lora_A.", ".lora_B.", "prompt_encoder.")):
            rows.set_rows(parameter, adapt.compute_initial_value(name, parameter.shape, recipe.training.seed))
    if recipe.method.type == "DoRA":
        _set_magnitudes(model)
    if recipe.method.type == "PromptTuning":
        token_ids = adapt.choose_prompt_tokens(
            recipe.method.soft_prompt or SoftPrompt(), tokenizer, recipe.training.seed
        )
        _initialize_prompt(model, token_ids)


def _read_adapter(model: nn.Module, recipe: Recipe, adapter: Path) -> None:
    with load_errors(recipe.model):
        for parameter, values in continued.match_weights(model, adapter, recipe).values():
            rows.set_rows(parameter, values)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device on `device`, and move the others there; tied parameters stay one parameter."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    model._apply(  # noqa: SLF001 - as nn.Module.to_empty does, which would empty the buffers too
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
    # NB: `_apply` makes a new parameter for each name of an unsharded parameter on the meta device.
    for first_name, *tied_names in names_by_parameter.values():
        for name in tied_names:
            replace_tensor(model, name, model.get_parameter(first_name))


def read_weights(
    model: nn.Module,
    spec: Model,
    source: Path,
    world: World,
    field_name: str = "model.base",
    *,
    new: NewTokens = NO_TOKENS,
) -> None:
    """Read a model's weights into its parameters; each rank reads the rows that it holds. A score head that the files lack is left out.

    If the files name the weights differently, or store each expert separately, a rank reads the tensors that its rows are made of.
    Pickles cannot be read in rows: rank 0 loads all of them and broadcasts the weights.

    Raises:
        RecipeRefusedError: files are missing, damaged, or of another model.
    """
    targets = _collect_targets(model, new)
    model_task = task.of_model(base_of(model))

    def try_to_read() -> bool:
        with load_errors(spec, field_name):
            if score_head.is_new(base_of(model), spec, source):
                targets.pop(score_head.WEIGHT)
            if not stored_tensors.has_safetensors(source):
                return False
            for name in _read_parts(targets, _collect_parts(targets, spec, source, model_task)):
                world.say(
                    f"{field_name}: its files do not contain the weight {name}, which stays as the code of the model initializes it"
                )
            return True

    if not world.agree(try_to_read):
        world.say(f"{field_name}: its weights are stored in pickles, so rank 0 loads all of them")
        _broadcast(targets, spec, source, world, field_name=field_name, model_task=model_task)


@dataclass(frozen=True)
class _Target:
    """The tensors of a model that get the values of one weight in the base's files.

    tensors: all of the same shape. A layer of modulesToSave has two: the original and the trained copy.
    new: the tokens for which the weight gets rows; NO_TOKENS unless the weight is that of the embedding or of the output layer.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    new: NewTokens = NO_TOKENS

    @property
    def is_buffer(self) -> bool:
        """Whether the tensors are buffers, which have initial values from the model's code."""
        return not isinstance(self.tensors[0], nn.Parameter)

    @property
    def shape(self) -> list[int]:
        return list(self.tensors[0].shape)

    def extend(self, stored: Any) -> Any:
        """Return a stored tensor, or a slice of a file, with the rows of new tokens."""
        return new_tokens.ExtendedWeight(stored, self.new) if self.new.ids else stored

    def set(self, value: Any) -> None:
        for tensor in self.tensors:
            rows.set_rows(tensor, value)


def _collect_targets(model: nn.Module, new: NewTokens) -> dict[str, _Target]:
    """Return the tensors of the base model that the files contain, by name; without the parameters of the method.

    These are the parameters and the persistent buffers, for example a router's score corrections.
    """
    base = base_of(model)
    embedding_and_head_ids = {id(weight) for weight in new_tokens.embedding_and_head_weights(base)}
    targets: dict[str, _Target] = {}
    seen_ids: set[int] = set()
    # With `keep_vars`, the tensors are the parameters themselves, so that a tied weight has the same id under both names.
    for name, tensor in base.state_dict(keep_vars=True).items():
        # A tied weight is listed once, by its first name, as in the files.
        if id(tensor) not in seen_ids and not any(part in name for part in _PEFT_PARAMETERS):
            seen_ids.add(id(tensor))
            target = _Target(new=new if id(tensor) in embedding_and_head_ids else NO_TOKENS)
            targets.setdefault(_PEFT_WRAPPER.sub("", name), target).tensors.append(tensor)
    return targets


def _collect_parts(
    names: Collection[str], spec: Model, source: Path, model_task: task.Task
) -> dict[str, stored_tensors.Part]:
    """Return the tensors of the files by the names of the model's weights, file by file."""
    parts: dict[str, stored_tensors.Part] = dict(stored_tensors.open_tensors(source))
    if set(names) <= set(parts):
        return parts
    from transformers import AutoConfig

    trust = spec.trust_remote_code
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust)
    # NB: a new empty model, because the conversion expects the names of transformers, and peft and FSDP have changed those of the model.
    task.configure(config, model_task, spec.base)
    empty_model = build_empty_model(config, torch.float32, trust=trust, model_task=model_task)
    return stored_tensors.map_layout(empty_model, parts).parts


def _read_parts(targets: dict[str, _Target], parts: dict[str, stored_tensors.Part]) -> list[str]:
    """Read each rank's rows; DCP's HuggingFaceStorageReader is no faster (docs/design/speed.md).

    Returns:
        The buffers that the files lack, which keep their initial values as in transformers.
    """
    missing = [name for name in targets if name not in parts]
    for name in missing:
        if not targets[name].is_buffer:
            raise ValueError(f"its files have no {name} of the shape {targets[name].shape}")
    for name, part in parts.items():
        if name not in targets:
            continue
        target = targets[name]
        extended = target.extend(part)
        shape = new_tokens.shape_of(extended)
        if shape != target.shape:
            where = part.path.name if isinstance(part, stored_tensors.Stored) else "its files"
            raise ValueError(
                f"{name} has the shape {shape} in {where}, but {target.shape} according to config.json"
            )
        target.set(extended)
    return missing


def _broadcast(
    targets: dict[str, _Target],
    spec: Model,
    source: Path,
    world: World,
    *,
    field_name: str,
    model_task: task.Task,
) -> None:
    """Load all weights on rank 0, and broadcast them one by one."""

    def load() -> dict[str, torch.Tensor]:
        if not world.leads:
            return {}
        with load_errors(spec, field_name):
            model = load_unsharded(spec, source, model_task=model_task)
            expected_names = {*targets, score_head.WEIGHT}
            untied_name = next(
                (name for name, _ in model.named_parameters() if name not in expected_names), None
            )
            if untied_name is not None:
                # NB: transformers does not tie weights that have different values in the files.
                raise ValueError(
                    f"its files have a separate {untied_name}, which config.json ties to another weight: set tie_word_embeddings to "
                    "false in config.json"
                )
            state = dict(model.state_dict())
            tensors = {
                name: target.extend(state[name])[:] for name, target in targets.items() if name in state
            }
            for name, target in targets.items():
                if name not in tensors or list(tensors[name].shape) != target.shape:
                    raise ValueError(f"its files have no {name} of the shape {target.shape}")
            return tensors

    weights = world.agree(load)
    for name, target in targets.items():
        # The widest dtype: a trained copy is fp32, and its original may be narrower.
        dtype = max((tensor.dtype for tensor in target.tensors), key=lambda kind: kind.itemsize)
        value = weights[name].to(dtype) if world.leads else torch.empty(target.shape, dtype=dtype)
        dist.broadcast(value, src=0)
        target.set(value)


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
                # A Conv1D has its outputs in columns, and a rank holds only some rows: all are gathered.
                rows.set_rows(magnitude, rows.gather_tensor(base).float().norm(dim=0))
            else:
                # A rank holds the same rows of the magnitude and of the weight.
                local_magnitude, _ = rows.local_rows(magnitude)
                local_base, _ = rows.local_rows(base)
                local_magnitude.copy_(local_base.float().norm(dim=1))


def _initialize_prompt(model: nn.Module, token_ids: torch.Tensor) -> None:
    prompt = next(parameter for name, parameter in model.named_parameters() if "prompt_encoder." in name)
    embedding = base_of(model).get_input_embeddings().weight
    whole_embedding = rows.gather_tensor(embedding).detach()
    initial_prompt = whole_embedding[token_ids.to(whole_embedding.device)].float()
    rows.set_rows(prompt, initial_prompt)
