"""The parts of a model's folder: a base, a tokenizer, an adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin

# Folders of MLflow's transformers flavor.
_MLFLOW_MODEL, _MLFLOW_TOKENIZER = "model", "components/tokenizer"
_ADAPTER_CONFIG = "adapter_config.json"
# A saved tokenizer has at least one of these files.
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Parts:
    """The folders of the parts of one model; None for a part that it lacks. The base of an adapter may be another model.

    of: how the adapter names its base, or None.
    origin: where the base can be fetched again, if it is one of the parts and an address names it; otherwise None.
    """

    base: Path | None
    tokenizer: Path | None
    adapter: Path | None = None
    of: Origin | None = None
    origin: Origin | None = None


def read_folder(folder: Path, at: Origin) -> Parts:
    """Return the parts of a folder that `save_pretrained` of transformers or peft wrote; `at`: where it was fetched from."""
    tokenizer = folder if any((folder / name).exists() for name in _TOKENIZER_FILES) else None
    config = folder / _ADAPTER_CONFIG
    if not config.exists():
        return Parts(folder, tokenizer, origin=at)
    stored = json.loads(config.read_text(encoding="utf-8"))
    return Parts(
        base=None,
        tokenizer=tokenizer,
        adapter=folder,
        of=_find_base(folder, stored.get("base_model_name_or_path"), stored.get("revision")),
    )


def _find_base(adapter: Path, name: str | None, revision: str | None) -> Origin | None:
    """Return the base of an adapter: from the reference file that this trainer writes, or else as peft or MLflow names the base."""
    return base_reference.read_reference(adapter) or (Origin(name, revision) if name else None)


def read_version(folder: Path, at: Origin) -> Parts:
    """Return the parts of a folder that MLflow's transformers flavor wrote; otherwise, the parts of a plain folder."""
    flavor = _read_transformers_flavor(folder / "MLmodel")
    inner = flavor.get("model_binary", _MLFLOW_MODEL)
    model, components = folder / inner, folder / _MLFLOW_TOKENIZER
    base = model if model.is_dir() else None
    tokenizer = components if components.is_dir() else None
    # NB: MLflow can fetch a folder inside a version (models:/name/version) by a URI, but not a folder inside a logged model (models:/id).
    is_version = at.uri.count("/") > 1
    inner_origin = Origin(f"{at.uri}/{inner}") if base and is_version else None
    # NB: a merged model also has its adapter next to it; the flavor names only an adapter that is not merged yet.
    if "peft_adaptor" not in flavor:
        # Without an adapter, the address of the whole model also names the base.
        plain = read_folder(base or folder, inner_origin or at)
        return replace(plain, tokenizer=tokenizer or plain.tokenizer)
    adapter = folder / flavor["peft_adaptor"]
    name = flavor.get("local_base_model_path") or flavor.get("source_model_name")
    of = _find_base(adapter, name, flavor.get("source_model_revision"))
    # NB: not `inner_origin or at`, as for a plain folder: `at` names the adapter. No address names the base inside a logged model.
    return Parts(base=base, tokenizer=tokenizer, adapter=adapter, of=of, origin=inner_origin)


def _read_transformers_flavor(mlmodel: Path) -> dict[str, Any]:
    """Return what MLflow's transformers flavor recorded about a model; empty if another flavor saved it."""
    stored = yaml.safe_load(mlmodel.read_text(encoding="utf-8")) if mlmodel.exists() else None
    flavor: dict[str, Any] = ((stored or {}).get("flavors") or {}).get("transformers") or {}
    return flavor
