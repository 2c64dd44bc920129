"""The trained model as files: safetensors, tokenizer, model card, and MLflow's MLmodel."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from finetune_trainer.train.checkpoint.shards import trained_state
from finetune_trainer.train.delivery import signature
from finetune_trainer.train.delivery.lineage import model_card
from finetune_trainer.train.model import load, merge
from finetune_trainer.train.model.network import base_of

if TYPE_CHECKING:
    from pathlib import Path

    from mlflow.models import ModelSignature
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.delivery.lineage import Lineage
    from finetune_trainer.train.runtime.distributed import World

# NB: MLflow's transformers flavor looks for these folders.
_MODEL, _ADAPTER, _TOKENIZER = "model", "peft", "components/tokenizer"
_TASK = "text-generation"
_REQUIREMENTS = ("torch", "transformers", "accelerate", "safetensors")


def gather(model: nn.Module, source: Path, recipe: Recipe, world: World) -> dict[str, torch.Tensor]:
    """The trained weights on the host of rank 0; empty on the others. A collective call.

    Weights of full training have the type that the base is stored in, adapters stay in fp32. The weights are gathered one
    at a time, and each rank casts its shard before that, so that rank 0 holds one copy of the model, in that type.

    DCP's HuggingFaceStorageWriter with consolidate_safetensors_files cannot be used: the ranks of other pods share no
    folder with rank 0, and its files have the modules' names, while `save_pretrained` restores the names in the base's
    files. docs/design/speed.md compares both.

    Args:
        model: the sharded model.
        source: folder of the base model.
        recipe: the recipe.
        world: the ranks.
    """
    dtype = _dtype_of(source, recipe) if recipe.method.type == "Full" else torch.float32
    # NB: save_pretrained recognises tied weights by shared memory, which gathered weights do not have.
    tied = base_of(model).all_tied_weights_keys
    gathered: dict[str, torch.Tensor] = {}
    for name, shard in trained_state(model).items():
        if name in tied:
            continue
        stored = shard.to(dtype) if shard.is_floating_point() else shard
        unsharded = stored.full_tensor() if isinstance(stored, DTensor) else stored
        if world.leads:
            gathered[name] = unsharded.cpu()
    return gathered


def write(
    folder: Path,
    *,
    model: nn.Module,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    lineage: Lineage,
    examples: signature.Examples,
) -> None:
    """Write the model in MLflow's layout; call it on rank 0 only.

    Full training and merged adapters give a standalone model in `model/`. Adapters and virtual tokens go to `peft/`, also
    beside a merged model, and name their base. A base that cannot be found by its name elsewhere is copied too.

    Args:
        folder: an empty folder.
        model: the sharded model.
        state: the result of `gather`.
        tokenizer: the tokenizer.
        source: where the base model was loaded from.
        lineage: for the model card.
        examples: for the signature, and for whether the model is served as a chat model.
    """
    recipe = lineage.recipe
    base = recipe.model.base
    tokenizer.save_pretrained(folder / _TOKENIZER)
    flavor: dict[str, Any] = {
        "task": _TASK,
        "instance_type": "TextGenerationPipeline",
        "components": ["tokenizer"],
        "tokenizer_type": type(tokenizer).__name__,
    }
    if recipe.method.type == "Full":
        _write_unsharded(model, state, source, recipe, folder / _MODEL)
        flavor |= {"model_binary": _MODEL, "source_model_name": base}
    else:
        _write_adapter(model, state, folder / _ADAPTER)
        if recipe.method.export == "Merged":
            merge.into(source, folder / _ADAPTER, recipe.model, folder / _MODEL)
            flavor |= {"model_binary": _MODEL, "source_model_name": base}
        else:
            flavor |= {"peft_adaptor": _ADAPTER, **_reference_to_base(source, recipe, folder)}
    for weights in (folder / _MODEL, folder / _ADAPTER):
        if weights.is_dir():
            tokenizer.save_pretrained(weights)
            (weights / "README.md").write_text(model_card(lineage), encoding="utf-8")
    flavor["pipeline_model_type"] = _architecture(model)
    signed = signature.infer(examples) if _wants_signature(recipe) else None
    task = signature.CHAT if examples.chat else None
    _write_mlmodel(folder, flavor, signed, adapter=recipe.method.type != "Full", task=task)


def _write_unsharded(
    model: Any, state: dict[str, torch.Tensor], source: Path, recipe: Recipe, folder: Path
) -> None:
    merge.save(model, folder, source, state_dict=state)
    # NB: save_pretrained writes the type of the fp32 master weights into the config, not that of the files.
    model.config.dtype = _dtype_of(source, recipe)
    model.config.save_pretrained(folder)


def _write_adapter(model: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    config = model.peft_config["default"]
    if not config.is_prompt_learning:
        # NB: without this argument peft asks the Hub whether the vocabulary has grown.
        model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
        return
    # NB: peft would compute the virtual tokens from the model, of which this rank has only a shard.
    from safetensors.torch import save_file

    (tokens,) = state.values()
    folder.mkdir()
    save_file({"prompt_embeddings": tokens.contiguous()}, folder / "adapter_model.safetensors")
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _reference_to_base(source: Path, recipe: Recipe, folder: Path) -> dict[str, str]:
    """How MLflow finds an adapter's base: a path, a commit on the Hub, or a copy, as Unity Catalog needs it.

    A base that was merged from an adapter exists only in this pod, and is copied.
    """
    base = recipe.model.base
    if os.environ.get("MLFLOW_REGISTRY_URI", "").startswith("databricks-uc"):
        # NB: a version in Unity Catalog holds its weights: MLflow's client would download them from the Hub.
        merge.save(load.unsharded(recipe.model, source), folder / _MODEL, source)
        return {"model_binary": _MODEL, "source_model_name": base}
    if str(source) == base:
        return {"local_base_model_path": base, "source_model_name": base}
    commit = _hub_commit(source)
    if commit is not None:
        return {"source_model_name": base, "source_model_revision": commit}
    merge.save(load.unsharded(recipe.model, source), folder / _MODEL, source)
    return {"model_binary": _MODEL, "source_model_name": base}


def _hub_commit(source: Path) -> str | None:
    """The commit of a model from the Hub: the name of its snapshot's folder in the cache."""
    return source.name if source.parent.name == "snapshots" else None


def _dtype_of(source: Path, recipe: Recipe) -> torch.dtype:
    """The type in which the base model's weights are stored, and in which trained ones are saved."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(source), trust_remote_code=recipe.model.trust_remote_code)
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _architecture(model: Any) -> str:
    # NB: FSDP renames the classes of sharded layers, but never that of the model itself.
    return type(base_of(model)).__name__


def _wants_signature(recipe: Recipe) -> bool:
    return recipe.register_ is None or recipe.register_.signature


def _write_mlmodel(
    folder: Path, flavor: dict[str, Any], signed: ModelSignature | None, *, adapter: bool, task: str | None
) -> None:
    """Write MLmodel and its requirements, with which MLflow loads the folder by its transformers flavor or as a pyfunc.

    Args:
        task: how it is served, where not as text to text. MLflow reads it in the flavor, Databricks in the metadata.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    packages = (*_REQUIREMENTS, "peft") if adapter else _REQUIREMENTS
    pins = [f"{package}=={version(package).split('+')[0]}" for package in packages]
    requirements = "".join(f"{line}\n" for line in (f"mlflow=={version('mlflow')}", *pins))
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    mlmodel = Model(signature=signed, metadata={"task": task} if task else None)
    if task:
        flavor = flavor | {"inference_task": task}
    mlmodel.add_flavor("transformers", transformers_version=version("transformers"), code=None, **flavor)
    pyfunc.add_to_model(mlmodel, loader_module="mlflow.transformers")
    mlmodel.save(str(folder / "MLmodel"))
