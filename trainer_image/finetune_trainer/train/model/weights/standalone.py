"""Writes a standalone model from its base's files one tensor at a time, with or without a merged adapter.

The host holds one file of weights, at most 4 GB, and the adapter: a base of 140 GB needs no more memory than a small base.
peft's own merge of bases that accelerate offloads to disk keeps each merged layer in memory
(`peft.tuners.tuners_utils.onload_layer`).
"""

from __future__ import annotations

import ctypes
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from finetune_trainer.train.model.adapters.new_tokens import (
    NO_TOKENS,
    ExtendedWeight,
    NewTokens,
    embedding_and_head_weights,
)
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import replace_tensor
from finetune_trainer.train.model.weights import load, score_head, stored_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from finetune_crds.training import Model

_GENERATION = "generation_config.json"
_WEIGHTS_PATTERN, _INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
# Uploads through the MLflow server fail for files above 5 GB.
_MAX_SHARD_SIZE = "4GB"


def save(model: Any, folder: Path, source: Path, **options: Any) -> None:
    """Save a model whose weights are in memory, in shards, with the generation config of its base.

    Args:
        model: a model of transformers.
        folder: where to save the model.
        source: folder of the base.
        options: other options of `save_pretrained`.
    """
    from transformers import GenerationConfig

    # NB: transformers refuses to write some of the generation configs that it reads, so the file of the base is copied instead.
    is_language_model = task.of_model(model) == "LanguageModel"
    if is_language_model:
        model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder, max_shard_size=_MAX_SHARD_SIZE, **options)
    generation_config = source / _GENERATION
    if is_language_model and generation_config.exists():
        shutil.copyfile(generation_config, folder / _GENERATION)


class Standalone:
    """A model whose weights stay in the files of its base until they are written.

    Its parameters have a shape and a dtype on the host, but no memory and no values, except `adapter_names`. So peft can load an
    adapter onto it as onto any model.

    Args:
        spec: names the base.
        source: folder of the base.
        new_tokens: tokens that get rows.
        adapter_names: parameters of the base that an adapter replaces; they are read into memory.
        model_task: the task; None: that of the base. An adapter that is a reward model has the score head that the base lacks.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: the base cannot be loaded.
    """

    def __init__(
        self,
        spec: Model,
        source: Path,
        *,
        new_tokens: NewTokens = NO_TOKENS,
        adapter_names: frozenset[str] = frozenset(),
        model_task: task.Task | None = None,
    ) -> None:
        self._source = source
        # `_files`: the tensors in the files, by their names in the files. `_parts`: the values of parameters and buffers, by their names
        # in the model.
        self._files = stored_tensors.open_tensors(source)
        self.model: PreTrainedModel = load.load_unsharded(spec, source, device="meta", model_task=model_task)
        self._parts = stored_tensors.map_layout(self.model, self._files).parts
        if score_head.is_new(self.model, spec, source):
            score = self.model.get_parameter(score_head.WEIGHT)
            self._parts[score_head.WEIGHT] = torch.zeros(score.shape, dtype=score.dtype)
        self._tie()
        if new_tokens.ids:
            self._extend_parts(new_tokens)
            new_tokens.enlarge(self.model)
        self._initialize_buffers(spec)
        self._check()
        # The name of each parameter without values; tied parameters share one.
        self._names = WeakTensorKeyDictionary()
        self._allocate(adapter_names)
        # The layers of the adapter, by name.
        self._layers: dict[str, nn.Module] = {}
        # Parameters of a merged layer that are not written yet, by name.
        self._merged: dict[str, torch.Tensor] = {}

    def _extend_parts(self, new_tokens: NewTokens) -> None:
        """Add the rows of new tokens to the values of the embedding and of the output layer."""
        embedding_and_head_ids = {id(weight) for weight in embedding_and_head_weights(self.model)}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            if id(weight) in embedding_and_head_ids and name in self._parts:
                self._parts[name] = ExtendedWeight(self._parts[name], new_tokens)

    def _tie(self) -> None:
        """Tie weights that are stored twice, if they are equal: transformers does so only with loaded weights."""
        for name, tied_name in stored_tensors.find_tied_duplicates(self.model, self._parts):
            if stored_tensors.is_equal(self._parts[name], self._parts[tied_name]):
                replace_tensor(self.model, name, self.model.get_parameter(tied_name))

    def _initialize_buffers(self, spec: Model) -> None:
        """Initialize buffers that the files lack with the values of the model's code, as transformers does."""
        # Buffers that are not persistent are neither in `state` nor in files.
        state = self.model.state_dict()
        missing = [
            name for name, _ in self.model.named_buffers() if name in state and name not in self._parts
        ]
        if not missing:
            return
        initialized = load.build_empty_model(
            self.model.config, self.model.dtype, trust=spec.trust_remote_code
        )
        for name in missing:
            replace_tensor(self.model, name, initialized.get_buffer(name).to(state[name].dtype))

    def _check(self) -> None:
        buffers = {name for name, _ in self.model.named_buffers()}
        for name, tensor in self.model.state_dict().items():
            part = self._parts.get(name)
            # `_initialize_buffers` has set the buffers that the files lack.
            if part is None and name in buffers:
                continue
            if part is None or list(part.shape) != list(tensor.shape):
                raise ValueError(f"its files have no {name} of the shape {list(tensor.shape)}")

    def _allocate(self, adapter_names: frozenset[str]) -> None:
        """Allocate the parameters on the host: those that an adapter replaces with values, the others as placeholders."""
        allocated: dict[int, nn.Parameter] = {}
        parameters = list(self.model.named_parameters(remove_duplicate=False))
        adapter_ids = {id(weight) for name, weight in parameters if name in adapter_names}
        for name, weight in parameters:
            if id(weight) not in allocated:
                if id(weight) in adapter_ids:
                    values = self._read(name, weight.dtype)
                    allocated[id(weight)] = nn.Parameter(values, requires_grad=False)
                else:
                    allocated[id(weight)] = self._allocate_placeholder(name, weight)
            replace_tensor(self.model, name, allocated[id(weight)])

    def _allocate_placeholder(self, name: str, weight: torch.Tensor) -> nn.Parameter:
        placeholder = nn.Parameter(_to_placeholder(weight), requires_grad=False)
        self._names[placeholder] = name
        return placeholder

    def clone_parameter(self, weight: nn.Parameter) -> nn.Parameter:
        """Copy a parameter, whose values may be in the files."""
        name = self._names.get(weight)
        if name is not None:
            return self._allocate_placeholder(name, weight)
        return nn.Parameter(weight.detach().clone(), requires_grad=False)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a weight of the base into new memory."""
        stored = self._parts[name][:]
        return torch.empty_like(stored, dtype=dtype).copy_(stored)

    def unload(self, adapted: Any) -> None:
        """Remove the adapter from a model, and keep its layers: they are merged one by one when the model is written.

        Args:
            adapted: the model with peft's adapter.

        Raises:
            ValueError: the adapter cannot be merged.
        """
        tuner = adapted.base_model
        tuner._check_merge_allowed()  # noqa: SLF001 - peft's merge_and_unload begins with it
        for name, module in tuner.model.named_modules():
            # A layer inside a layer of the adapter is merged with the outer layer.
            is_inside = any(name.startswith(f"{layer}.") for layer in self._layers)
            is_adapted = hasattr(module, "unload_and_optionally_merge_module") or hasattr(
                module, "base_layer"
            )
            if is_adapted and not is_inside:
                self._layers[name] = module
        self.model = adapted.unload()
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        # As peft does after it has merged. A reward model has no output embedding.
        if self.model.config.tie_word_embeddings and head is not None and embedding.weight is not head.weight:
            self.model.config.tie_word_embeddings = False

    def _merge(self, name: str) -> dict[str, torch.Tensor]:
        """Merge a layer of the adapter as peft's merge_and_unload does, and return its weights."""
        layer: Any = self._layers[name]
        placeholders = [weight for weight in layer.parameters() if weight in self._names]
        for weight in placeholders:
            weight.data = self._read(self._names[weight], weight.dtype)
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
        else:
            layer.merge(safe_merge=False, adapter_names=None)
            merged = layer.get_base_layer()
        tensors = {f"{name}.{key}": value.data for key, value in merged.state_dict(keep_vars=True).items()}
        for weight in placeholders:
            weight.data = _to_placeholder(weight)
        _release_freed_memory()
        return tensors

    def _compute_value(self, name: str) -> torch.Tensor:
        """Return a parameter or a buffer of the finished model."""
        if name in self._merged:
            return self._merged.pop(name)
        layer = next((layer for layer in self._layers if name.startswith(f"{layer}.")), None)
        if layer is not None:
            self._merged |= self._merge(layer)
            return self._merged.pop(name)
        tensor: torch.Tensor = self.model.get_parameter_or_buffer(name)
        # The values of a buffer without values and of a placeholder are in the files.
        if tensor.is_meta or tensor in self._names:
            return self._parts[name][:].to(tensor.dtype)
        return tensor.detach()

    def make_tensors(
        self, name: str, targets: tuple[str, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Make a tensor for the files, and the tensors that can only be made together with it.

        Args:
            name: its name in the files.
            targets: the parameters that it is part of.
            dtype: its type.
        """
        from transformers.core_model_loading import revert_weight_conversion

        stored = self._files.get(name)
        is_merged = any(target.startswith(f"{layer}.") for target in targets for layer in self._layers)
        is_converted = isinstance(self._parts.get(targets[0]), stored_tensors.Converted)
        if is_converted and not is_merged and stored is not None:
            # Experts that the adapter does not change need not be fused and split again.
            return {name: stored[:].to(dtype)}
        values = {target: self._compute_value(target) for target in targets}
        return dict(revert_weight_conversion(self.model, values))

    def save(self, folder: Path) -> None:
        """Write the model as `save_pretrained` does: the same files.

        Args:
            folder: where to save the model.
        """
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import save_file

        # The configurations, without weights.
        save(self.model, folder, self._source, state_dict={})
        placeholders = self._list_placeholders()
        shards = split_torch_state_dict_into_shards(
            placeholders, filename_pattern=_WEIGHTS_PATTERN, max_shard_size=_MAX_SHARD_SIZE
        )
        file_tensors = _FileTensors(self, placeholders)
        for file, names in shards.filename_to_tensors.items():
            tensors = {name: torch.empty_like(placeholders[name], device="cpu") for name in names}
            for name, tensor in tensors.items():
                tensor.copy_(file_tensors.take(name))
            save_file(tensors, folder / file, metadata={"format": "pt"})
            # NB: free the memory now: save_file creates reference cycles to the tensors (numpy's `ctypes`), which are collected later.
            for tensor in tensors.values():
                tensor.untyped_storage().resize_(0)
        if shards.is_sharded:
            metadata = {"total_parameters": self.model.num_parameters(), **shards.metadata}
            index = {"metadata": metadata, "weight_map": shards.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / _INDEX).write_text(text, encoding="utf-8")

    def _list_placeholders(self) -> dict[str, torch.Tensor]:
        """Return the tensors to write, without values, by the names in the files."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        state = {name: _to_meta(value) for name, value in self.model.state_dict().items()}
        for name in self.model._keys_to_ignore_on_save or ():  # noqa: SLF001 - as save_pretrained does
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, self.model)
        return dict(revert_weight_conversion(self.model, state))


class _FileTensors:
    """The tensors of a standalone model by the names in its files, each made on demand.

    Args:
        standalone: the model.
        placeholders: the tensors to write, without values.
    """

    def __init__(self, standalone: Standalone, placeholders: dict[str, torch.Tensor]) -> None:
        self._standalone = standalone
        self._placeholders = placeholders
        self._targets = stored_tensors.map_layout(standalone.model, placeholders).targets
        # Tensors that were made together with another tensor and not taken yet.
        self._ready: dict[str, torch.Tensor] = {}

    def take(self, name: str) -> torch.Tensor:
        """Make a tensor; each can be taken once."""
        if name not in self._ready:
            self._ready |= self._standalone.make_tensors(
                name, self._targets[name], self._placeholders[name].dtype
            )
        return self._ready.pop(name)


def _release_freed_memory() -> None:
    """Return freed memory to the system.

    NB: glibc before 2.38 does not reuse freed blocks below 32 MB (posix_memalign), so a small model would need more memory than
    its size.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _to_placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype whose elements share the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
