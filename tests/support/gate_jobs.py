"""The Jobs of the samples with gates of type Job, and a version that they measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from finetune_crds import ModelPromotion
from finetune_crds.recipe import Recipe
from finetune_trainer.train.delivery import signature
from support.exports import PROMPTS, written

if TYPE_CHECKING:
    from finetune_crds.gates import JobGate
    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod
    from support.training import Mlflow

SAMPLES = Path(__file__).parents[2] / "crds" / "samples"


def register_version(pod: Pod, base_model: Path, world: World, mlflow: Mlflow) -> str:
    """Register a version of the model of the samples, as the sample lora does, and return its URI. Its input is the column with the prompt."""
    job = yaml.safe_load((SAMPLES / "lora.yaml").read_text(encoding="utf-8"))
    recipe = Recipe.model_validate(pod.but({"data.columns": job["spec"]["data"]["columns"]}).recipe)
    assert recipe.data.columns
    examples = replace(PROMPTS, prompt=signature.name_prompt(recipe, recipe.data.columns))
    written(recipe, pod.folder / "export", base_model, world, examples)
    client = mlflow.client()
    client.create_registered_model("docstring-llama-lora")
    client.create_model_version("docstring-llama-lora", source=(pod.folder / "export").as_uri())
    return "models:/docstring-llama-lora/1"


def read_job(name: str) -> JobGate:
    """Return the Job of the first gate of a sample."""
    body = next(yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))
    job = ModelPromotion.model_validate(body).spec.gates[0].job
    assert job
    return job
