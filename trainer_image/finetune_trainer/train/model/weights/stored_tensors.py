"""Reads slices of the tensors in a model's files, and of the parameters that transformers makes from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from finetune_trainer.models.unsafe_files import UNSAFE
from finetune_trainer.pod.exit_status import RecipeRefusedError, first_line
from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Rows of two tensors that are compared at a time.
_ROWS_PER_COMPARISON = 8192


class Part(Protocol):
    """A tensor, or an object that returns slices of a tensor."""

    @property
    def shape(self) -> Any:
        """Its shape."""

    def __getitem__(self, at: slice) -> torch.Tensor:
        """Some of its rows."""


class _LastOpenedFile:
    """Keeps only the last file open, because mapped files are large.

    Reopening it for each tensor would read its header again, which is large if the file has thousands of experts.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def __call__(self, path: Path) -> Any:
        from safetensors import safe_open

        if path != self._path:
            # Close the previous file first.
            self._file, self._path = None, None
            self._file, self._path = safe_open(path, framework="pt"), path
        return self._file


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, readable in slices."""

    path: Path
    name: str
    shape: list[int]
    _opened: _LastOpenedFile = field(repr=False)

    def __getitem__(self, at: slice) -> torch.Tensor:
        file = self._opened(self.path)
        # A scalar has no slices.
        values: torch.Tensor = file.get_slice(self.name)[at] if self.shape else file.get_tensor(self.name)
        return values


def has_safetensors(source: Path) -> bool:
    """Whether a model has safetensors files, which can be read in slices."""
    return bool(_find_files(source))


def open_tensors(source: Path) -> dict[str, Stored]:
    """Return the tensors in a model's safetensors files, by name, file by file; empty without safetensors files.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
        RecipeRefusedError: the index names a file outside of the folder.
    """
    from safetensors import safe_open

    opened = _LastOpenedFile()
    tensors: dict[str, Stored] = {}
    for path in _find_files(source):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = Stored(path, name, list(file.get_slice(name).get_shape()), opened)
    return tensors


def _find_files(source: Path) -> list[Path]:
    # NB: if weights are in one file and in several files, transformers reads the one file.
    if (source / _SINGLE).exists():
        return [source / _SINGLE]
    if not (source / _INDEX).exists():
        return []
    index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise RecipeRefusedError(
            f"{source / _INDEX} does not name a file for each weight: correct the index, or use another model",
            reason=UNSAFE,
        )
    return [source / _check_name(source, name) for name in sorted(set(names.values()))]


def _check_name(source: Path, name: str) -> str:
    """Return a name in the index; raises RecipeRefusedError if it leads out of the folder."""
    try:
        return check_relative_path(name)
    except UnsafePathError as error:
        raise RecipeRefusedError(
            f"{source / _INDEX} names {error}: correct the index, or use another model", reason=UNSAFE
        ) from error


@dataclass(frozen=True)
class Layout:
    """The mapping of tensors in files to the parameters of a model, and back.

    parts: the parameters and persistent buffers that the files contain, by their names in the model.
    targets: for the name of each tensor in the files, the parameters that the tensor is part of, for example
        `{"experts.0.up_proj.weight": ("experts.gate_up_proj",)}`; without tensors that the model lacks.
    """

    parts: dict[str, Part]
    targets: dict[str, tuple[str, ...]]


def map_layout(model: PreTrainedModel, stored: Mapping[str, Part]) -> Layout:
    """Map the tensors in files to the parameters of a model, as transformers' `from_pretrained` does.

    Args:
        model: a model with the names of transformers; it need not have values.
        stored: the tensors in the files, by name.

    Raises:
        ValueError: the tensors cannot be converted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    converters_by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    state = model.state_dict()
    layout = Layout({}, {})
    # The names of the tensors that a converter takes: by the name of the first parameter that it makes of them, then by pattern. For
    # example, {"experts.gate_up_proj": {"experts.*.up_proj.weight": ["experts.0.up_proj.weight", "experts.1.up_proj.weight"], ...}}.
    converted: dict[str, dict[str, list[str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        # The name in the model, and the pattern of the converter that matches the tensor; None: the tensor is the parameter.
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        # As in transformers: a name that the model has is not renamed, apart from its prefix.
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in state:
            continue
        if pattern is None:
            layout.parts.setdefault(target, stored[name])
            layout.targets[name] = (target,)
        else:
            converted.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, names_by_pattern in converted.items():
        sources = {
            pattern: [stored[name] for name in stored_names]
            for pattern, stored_names in names_by_pattern.items()
        }
        # All patterns of a target belong to one converter.
        first_pattern, *_ = names_by_pattern
        conversion = _Conversion(model, converters_by_pattern[first_pattern], target, sources)
        parameters = conversion.build_parts()
        layout.parts.update({name: part for name, part in parameters.items() if name in state})
        targets = tuple(name for name in parameters if name in state)
        layout.targets.update(
            {name: targets for stored_names in names_by_pattern.values() for name in stored_names}
        )
    _add_tied_parts(model, layout.parts)
    return layout


def _add_tied_parts(model: PreTrainedModel, parts: dict[str, Part]) -> None:
    """Add each tied weight that the files have under one of its two names under the other name too."""
    for first_name, second_name in model.all_tied_weights_keys.items():
        for name, tied_name in ((first_name, second_name), (second_name, first_name)):
            if name not in parts and tied_name in parts:
                parts[name] = parts[tied_name]


def find_tied_duplicates(model: PreTrainedModel, parts: Mapping[str, Part]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names that a model ties, but whose weights are both in the files."""
    for name, tied_name in model.all_tied_weights_keys.items():
        part, tied_part = parts.get(name), parts.get(tied_name)
        if part is not None and tied_part is not None and part is not tied_part:
            yield name, tied_name


def is_equal(first: Part, second: Part) -> bool:
    """Whether two stored tensors are equal, compared one block of rows at a time."""
    if list(first.shape) != list(second.shape):
        return False
    blocks = (
        slice(begin, begin + _ROWS_PER_COMPARISON) for begin in range(0, first.shape[0], _ROWS_PER_COMPARISON)
    )
    return all(torch.equal(first[block], second[block]) for block in blocks)


@dataclass(frozen=True)
class _Conversion:
    """Tensors of files that transformers converts into one or more parameters.

    target: the first of the parameters.
    sources: the tensors, by the pattern that matches their names, in the order of their names.
    """

    model: PreTrainedModel
    converter: WeightConverter
    target: str
    sources: dict[str, list[Part]]

    def build_parts(self) -> dict[str, Part]:
        """Return the parameters, by name."""
        # Without values: only their shapes are needed.
        parameters = self._run(lambda part: torch.empty(list(part.shape), device="meta"), self.sources)
        # Rows can be made alone if each pattern has one tensor per row.
        counts = {len(parts) for parts in self.sources.values()}
        by_rows = (
            self._stacks_rows()
            and len(counts) == 1
            and all(parameter.shape[0] in counts for parameter in parameters.values())
        )
        return {
            name: Converted(self, name, list(parameter.shape), by_rows=by_rows)
            for name, parameter in parameters.items()
        }

    def _stacks_rows(self) -> bool:
        """Whether each row of a parameter is made of one tensor per pattern, as in fused experts."""
        from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

        def mixes_rows(operation: Any) -> bool:
            if type(operation) is Transpose:
                return bool(min(operation.dim0, operation.dim1) <= 0)
            if type(operation) in (Concatenate, Interleave):
                return bool(operation.dim <= 0)
            # An unknown operation may mix rows.
            return True

        # The first operation stacks the tensors, and no later operation may apply to dimension 0. A dimension counted from the end may be 0.
        merge, *operations = self.converter.operations
        is_stacking = type(merge) is MergeModulelist and merge.dim == 0
        return is_stacking and not any(mixes_rows(operation) for operation in operations)

    def read(self, name: str, rows: slice | None) -> torch.Tensor:
        """Make a parameter, or some of its rows, from only the tensors of these rows."""
        sources = self.sources
        if rows is not None:
            sources = {pattern: parts[rows] for pattern, parts in sources.items()}
        return self._run(lambda part: part[:], sources)[name]

    def _run(self, read: Any, sources: Mapping[str, Iterable[Part]]) -> dict[str, torch.Tensor]:
        """Convert tensors, each read by `read`, and return the parameters by name."""
        from copy import deepcopy

        converter = deepcopy(self.converter)
        for pattern, parts in sources.items():
            for part in parts:
                # The first `pattern` is in place of the tensor's name, which the conversion does not use.
                converter.add_tensor(self.target, pattern, pattern, partial(read, part))
        try:
            converted = converter.convert(self.target, model=self.model, config=self.model.config)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{self.target} cannot be converted from the tensors in its files: {first_line(error)}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True)
class Converted:
    """A parameter that transformers makes from several tensors, or from a part of a tensor.

    by_rows: whether rows can be made without the tensors of other rows.
    """

    conversion: _Conversion
    name: str
    shape: list[int]
    by_rows: bool

    def __getitem__(self, at: slice) -> torch.Tensor:
        begin, end, _ = at.indices(self.shape[0])
        if self.by_rows:
            return self.conversion.read(self.name, slice(begin, end))
        return self.conversion.read(self.name, rows=None)[begin:end]
