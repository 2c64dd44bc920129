"""The trained model as files: safetensors, tokenizer, model card, and MLflow's MLmodel with the code that serves it (`scoring`).

An adapter does not contain its base; it names where the base is (`origin`), and `scoring` fetches it. MLmodel also has MLflow's
transformers flavor. It loads the base of an adapter from the version, from the Hub at a commit, or from a folder, which the caller may pass
as `base_model_path`; it never loads from an object store or a registry. So an address that is not on the Hub is in
the flavor as a folder (`local_base_model_path`): a base on a volume is found where the volume is mounted; other bases must be
downloaded first.

Two kinds of versions contain the base:
- Versions in Unity Catalog: endpoints serve from there, and MLflow's client cannot register weights that are elsewhere, but would download
  them into the version.
- Adapters of a base that was merged in this pod: this base exists nowhere else.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.examples import answer_end
from finetune_trainer.examples.stop_tokens import GENERATION_CONFIG, read_stop_tokens
from finetune_trainer.examples.tokenizer import pad_id
from finetune_trainer.models import base_reference
from finetune_trainer.train.checkpoint.shards import get_trained_state
from finetune_trainer.train.delivery import signature
from finetune_trainer.train.delivery.lineage import build_metadata, render_model_card
from finetune_trainer.train.model import rows
from finetune_trainer.train.model.adapters import pissa
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import base_of
from finetune_trainer.train.model.weights import load, merge, score_head, standalone

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.models.base_reference import Origin
    from finetune_trainer.train.delivery.lineage import Lineage
    from finetune_trainer.train.runtime.distributed import World

# NB: MLflow's transformers flavor looks for these folders.
MODEL, ADAPTER, _TOKENIZER = "model", "peft", "components/tokenizer"
# The task in MLflow, the class of its pipeline in transformers, and the file with the code that serves it.
_TASKS: dict[task.Task, tuple[str, str, str]] = {
    "LanguageModel": ("text-generation", "TextGenerationPipeline", "scoring.py"),
    "RewardModel": ("text-classification", "TextClassificationPipeline", "reward_scoring.py"),
}
# transformers' `model_max_length` of a tokenizer without a limit.
_NO_LIMIT = int(1e30)
# Packages that a served model needs.
_REQUIREMENTS = ("torch", "transformers", "accelerate", "safetensors")
_SCORING, _CONDA_ENV, _PYTHON_ENV = "scoring.py", "conda.yaml", "python_env.yaml"


def gather_weights(model: nn.Module, source: Path, recipe: Recipe, world: World) -> dict[str, torch.Tensor]:
    """Return the trained weights on the host of rank 0; empty on other ranks. A collective call.

    Weights of full training have the stored dtype of the base, except those that transformers keeps in fp32; adapters stay in
    fp32. Each weight is cast in shards and then gathered, one weight at a time, so that rank 0 holds one copy of the model, in
    the final dtype.

    DCP's HuggingFaceStorageWriter with consolidate_safetensors_files cannot be used: the ranks of other pods share no
    folder with rank 0, and the writer uses the modules' names, while `save_pretrained` restores the names in the base's
    files. docs/design/speed.md compares both.

    Args:
        model: the sharded model.
        source: folder of the base model.
        recipe: the recipe.
        world: the ranks.
    """
    dtype = _read_dtype(source, recipe) if recipe.method.type == "Full" else torch.float32
    # NB: tied weights are left out: save_pretrained would recognize them only by shared memory, which gathered weights do not have.
    tied = base_of(model).all_tied_weights_keys
    is_kept_in_fp32 = load.fp32_name_filter(base_of(model), dtype)
    gathered: dict[str, torch.Tensor] = {}
    for name, shard in get_trained_state(model).items():
        if name in tied:
            continue
        stored = shard.to(dtype) if shard.is_floating_point() and not is_kept_in_fp32(name) else shard
        unsharded = rows.gather_tensor(stored)
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
    base: Origin | None,
    lineage: Lineage,
    examples: signature.Examples,
) -> None:
    """Write the model in MLflow's layout; call it on rank 0 only.

    Full training and merged adapters give a standalone model in `model/`. Adapters and virtual tokens go to `peft/`, even
    if they are also merged, and name their base.

    Args:
        folder: an empty folder.
        model: the sharded model.
        state: the result of `gather_weights`.
        tokenizer: the tokenizer.
        source: the folder that the base model was loaded from.
        base: the address that the base was fetched from, with its digest if `has_external_base`; None if it was merged in this pod.
        lineage: for the model card.
        examples: decide on the signature, and on whether the model is served as a chat model.
    """
    recipe = lineage.recipe
    model_task = task.of_recipe(recipe)
    is_reward_model = model_task == "RewardModel"
    base_stops = read_stop_tokens(source, trust_remote_code=recipe.model.trust_remote_code)
    # A reward model generates no text.
    stops = base_stops if is_reward_model else _align_stops(tokenizer, base_stops, chat=examples.chat)
    if is_reward_model:
        tokenizer.pad_token_id = pad_id(tokenizer)
    tokenizer.model_max_length = _max_text_tokens(tokenizer, model)
    tokenizer.save_pretrained(folder / _TOKENIZER)
    mlflow_task, pipeline, _ = _TASKS[model_task]
    flavor: dict[str, Any] = {
        "task": mlflow_task,
        "instance_type": pipeline,
        "components": ["tokenizer"],
        "tokenizer_type": type(tokenizer).__name__,
    }
    if recipe.method.type == "Full":
        _write_unsharded(model, state, source, recipe, folder / MODEL)
        flavor |= {"model_binary": MODEL, "source_model_name": base.uri if base else recipe.model.base}
    else:
        _write_adapter(model, state, folder / ADAPTER, base)
        # `_write_adapter` has set it to the address of the base, if the base has one.
        base_name = model.peft_config["default"].base_model_name_or_path
        if recipe.method.export == "Merged":
            new_tokens = NewTokens.of(recipe.model, tokenizer)
            merge.merge_into_base(
                source, folder / ADAPTER, recipe.model, folder / MODEL, new_tokens=new_tokens
            )
            flavor |= {"model_binary": MODEL, "source_model_name": base_name}
        elif base is not None and has_external_base(recipe):
            base_reference.write_reference(base, folder / ADAPTER)
            flavor |= {"peft_adaptor": ADAPTER, **_build_base_reference(base, source, recipe, tokenizer)}
        else:
            # The adapter's version contains the base: see the top of this module.
            merge.copy_base(source, recipe.model, folder / MODEL)
            flavor |= {"peft_adaptor": ADAPTER, "model_binary": MODEL, "source_model_name": base_name}
    for weights_folder in (folder / MODEL, folder / ADAPTER):
        if weights_folder.is_dir():
            tokenizer.save_pretrained(weights_folder)
            if is_reward_model and weights_folder.name == MODEL:
                score_head.write_padding(weights_folder, pad_id(tokenizer))
            # NB: an adapter has no generation config, and its base may have other stop tokens.
            if not is_reward_model and (stops != base_stops or weights_folder.name == ADAPTER):
                _write_stops(weights_folder, stops, source)
            (weights_folder / "README.md").write_text(render_model_card(lineage), encoding="utf-8")
    flavor["pipeline_model_type"] = _architecture(model)
    infer = signature.infer_reward_signature if is_reward_model else signature.infer_signature
    model_signature = infer(examples) if _has_signature(recipe) else None
    _write_mlmodel(
        folder, flavor, model_signature, _build_scoring_settings(recipe, flavor, base, examples), lineage
    )


def _align_stops(tokenizer: PreTrainedTokenizerBase, base_stops: list[int], *, chat: bool) -> list[int]:
    """Make the registered files stop at the tokens that the model was trained to stop at.

    Inference engines stop at the tokenizer's end of text and at the stop tokens of the generation config; transformers stops only at the
    latter. If the base does not stop at the token that ends an answer in the chat template, that token becomes the end of text.
    transformers' `align_special_tokens` does the same, but after the tokenizer has been changed by hand.

    Args:
        base_stops: the tokens at which the base stops.
        chat: whether answers end as in the chat template; otherwise they end with the tokenizer's end of text.

    Returns:
        All stop tokens for the generation config; `base_stops` if the end of an answer is among them.
    """
    eos = int(tokenizer.eos_token_id)
    end = answer_end.find_end_token(tokenizer) if chat else None
    end = eos if end is None else end
    if end in base_stops:
        return base_stops
    if end != eos:
        tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(end))
    return list(dict.fromkeys([end, *base_stops, eos]))


def _write_stops(folder: Path, stops: list[int], source: Path) -> None:
    """Set the stop tokens in the folder's generation config; if it has none, in a copy of the base's, or else in a new one."""
    files = (path / GENERATION_CONFIG for path in (folder, source))
    file = next((file for file in files if file.exists()), None)
    config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    text = json.dumps(config | {"eos_token_id": stops}, indent=2) + "\n"
    (folder / GENERATION_CONFIG).write_text(text, encoding="utf-8")


def _max_text_tokens(tokenizer: PreTrainedTokenizerBase, model: Any) -> int:
    """Return the maximum tokens of a text, from the tokenizer, or else from the model's configuration."""
    tokenizer_limit = tokenizer.init_kwargs.get("model_max_length")
    if tokenizer_limit is not None and tokenizer_limit < _NO_LIMIT:
        return int(tokenizer_limit)
    positions = getattr(base_of(model).config.get_text_config(), "max_position_embeddings", None)
    return int(positions or _NO_LIMIT)


def _write_unsharded(
    model: Any, state: dict[str, torch.Tensor], source: Path, recipe: Recipe, folder: Path
) -> None:
    standalone.save(model, folder, source, state_dict=state)
    # NB: save_pretrained writes the type of the fp32 master weights into the config, not the type of the files.
    model.config.dtype = _read_dtype(source, recipe)
    model.config.save_pretrained(folder)


def _write_adapter(model: Any, state: dict[str, torch.Tensor], folder: Path, base: Origin | None) -> None:
    """Write an adapter or virtual tokens; the configuration names the address of the base, if the base has one."""
    config = model.peft_config["default"]
    if base is not None:
        config.base_model_name_or_path, config.revision = base.uri, base.revision
    if not config.is_prompt_learning:
        # NB: unless `save_embedding_layers` is False, peft asks the Hub whether the vocabulary has grown.
        model.save_pretrained(
            folder, state_dict=pissa.convert_to_lora(model, state), save_embedding_layers=False
        )
        return
    # NB: peft would compute the virtual tokens from the model, but this rank has only a shard of it.
    from safetensors.torch import save_file

    (tokens,) = state.values()
    folder.mkdir()
    save_file({"prompt_embeddings": tokens.contiguous()}, folder / "adapter_model.safetensors")
    config.inference_mode = True
    config.save_pretrained(str(folder))


def has_external_base(recipe: Recipe) -> bool:
    """Whether the recipe registers an adapter that refers to its base, provided that the base has an address."""
    unity = os.environ.get("MLFLOW_REGISTRY_URI", "").startswith("databricks-uc")
    return recipe.method.type != "Full" and recipe.method.export != "Merged" and not unity


def _build_base_reference(
    base: Origin, source: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return how MLflow finds the base of an adapter: in a folder, or at a commit on the Hub."""
    reference = {"source_model_name": base.uri}
    if base.revision is None:
        return {**reference, "local_base_model_path": base.uri}
    reference["source_model_revision"] = base.revision
    if _has_other_tokenizer(tokenizer, source, recipe):
        # NB: with the commit alone, MLflow would load the tokenizer from the Hub too. With a folder it loads the tokenizer of the version;
        # transformers accepts a Hub id as the folder, and loads its newest commit.
        return {**reference, "local_base_model_path": base.uri}
    return {**reference, "tokenizer_name": base.uri, "tokenizer_revision": base.revision}


def _has_other_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path, recipe: Recipe) -> bool:
    """Whether the base has another tokenizer or none, for example because of another chat template."""
    from transformers import AutoTokenizer

    try:
        base_tokenizer = AutoTokenizer.from_pretrained(
            str(source), trust_remote_code=recipe.model.trust_remote_code
        )
    except (OSError, ValueError, KeyError):
        return True
    return bool(
        tokenizer.chat_template != base_tokenizer.chat_template
        or tokenizer.special_tokens_map != base_tokenizer.special_tokens_map
        or tokenizer.get_vocab() != base_tokenizer.get_vocab()
    )


def _read_dtype(source: Path, recipe: Recipe) -> torch.dtype:
    """Return the dtype in which the base model's weights are stored and trained weights are saved."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(source), trust_remote_code=recipe.model.trust_remote_code)
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _architecture(model: Any) -> str:
    # NB: FSDP renames the classes of sharded layers, but never the class of the model itself.
    return type(base_of(model)).__name__


def _has_signature(recipe: Recipe) -> bool:
    return recipe.register_ is None or recipe.register_.signature


def _build_scoring_settings(
    recipe: Recipe, flavor: dict[str, Any], base: Origin | None, examples: signature.Examples
) -> dict[str, Any]:
    """Return the settings of the served model, which `scoring` and `reward_scoring` describe."""
    # With `model_binary`, the version contains the base, or a standalone model.
    external_base = base if "model_binary" not in flavor else None
    settings = {
        "chat": examples.chat,
        "base": external_base.uri if external_base else None,
        "revision": external_base.revision if external_base else None,
        "adapter": "peft_adaptor" in flavor,
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    if task.of_recipe(recipe) == "RewardModel":
        return settings | {"prompt": examples.prompt, "response": signature.name_response(examples)}
    return settings | {
        "input": examples.input,
        "max_new_tokens": signature.MAX_NEW_TOKENS,
        "name": recipe.register_.model if recipe.register_ else recipe.job.name,
    }


def _write_mlmodel(
    folder: Path,
    flavor: dict[str, Any],
    model_signature: ModelSignature | None,
    settings: dict[str, Any],
    lineage: Lineage,
) -> None:
    """Write MLmodel, its code and its requirements, so that MLflow loads the folder with its transformers flavor or as a pyfunc."""
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.pyfunc.loaders import code_model
    from mlflow.utils.environment import _mlflow_conda_env, _PythonEnv

    packages = (*_REQUIREMENTS, "peft") if settings["adapter"] else _REQUIREMENTS
    # Package indices do not have the local part of a version, such as +cu128.
    pins = [f"mlflow=={version('mlflow')}", *(f"{name}=={version(name).split('+')[0]}" for name in packages)]
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in pins), encoding="utf-8")
    _mlflow_conda_env(path=str(folder / _CONDA_ENV), additional_pip_deps=pins)
    _PythonEnv.current().to_yaml(str(folder / _PYTHON_ENV))
    model_task = task.of_recipe(lineage.recipe)
    *_, code = _TASKS[model_task]
    shutil.copyfile(Path(__file__).with_name(code), folder / _SCORING)
    is_chat_model = settings["chat"] and model_task == "LanguageModel"
    metadata = build_metadata(lineage)
    # NB: MLflow reads the task in the flavor, Databricks in the metadata.
    if is_chat_model:
        metadata = metadata | {"task": signature.CHAT}
        flavor = flavor | {"inference_task": signature.CHAT}
    mlmodel = Model(signature=model_signature, metadata=metadata)
    mlmodel.add_flavor("transformers", transformers_version=version("transformers"), code=None, **flavor)
    pyfunc.add_to_model(
        mlmodel,
        loader_module=code_model.__name__,
        conda_env=_CONDA_ENV,
        python_env=_PYTHON_ENV,
        model_config=settings,
        model_code_path=_SCORING,
        streamable=False,
    )
    mlmodel.save(str(folder / "MLmodel"))
