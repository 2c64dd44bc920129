"""What is written is what was trained, for each kind of model and of base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from finetune_crds.contract import TrainResult
from finetune_crds.recipe import Recipe
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.tokenizer import load_tokenizer
from finetune_trainer.train import export
from finetune_trainer.train import model as models

if TYPE_CHECKING:
    from pods import Pod

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.usefixtures("mlflow_imported"),
]
LORA = {"type": "LoRA", "lora": {"rank": 4}}
INPUT = torch.arange(2, 20).unsqueeze(0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT).logits


def written(recipe: Recipe, folder: Path, source: Path) -> torch.Tensor:
    """Train a little by hand, export, and return what the trained model says."""
    model = models.adapt(models.load_model(recipe, source), recipe.method, recipe.model.base, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in models.trained(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    splits = recipe.data.splits
    assert splits is not None
    export.write(
        folder,
        model=model,
        state=export.gather(model),
        tokenizer=load_tokenizer(recipe.model, source),
        source=source,
        lineage=export.Lineage(recipe, splits, TrainResult(step=3, eval_loss=1.25)),
    )
    return logits(model)


@pytest.mark.parametrize(
    ("method", "base", "folders"),
    [
        ({"type": "Full"}, "path", {"model", "components"}),
        ({**LORA, "merge": True}, "path", {"model", "components"}),
        (LORA, "path", {"peft", "components"}),
        (LORA, "s3://models/base", {"peft", "model", "components"}),
    ],
)
def test_mlflow_loads_what_was_trained(
    pod: Pod, base_model: Path, method: dict[str, Any], base: str, folders: set[str]
) -> None:
    import mlflow

    changes = {"method": method, "model.base": str(base_model) if base == "path" else base}
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    folder = pod.folder / "export"
    folder.mkdir()
    trained = written(recipe, folder, base_model)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == folders
    parts = mlflow.transformers.load_model(str(folder), return_type="components")
    torch.testing.assert_close(logits(parts["model"]), trained, rtol=1e-4, atol=1e-4)
    assert parts["tokenizer"]("red").input_ids


def test_the_model_serves_as_a_pyfunc(pod: Pod, base_model: Path) -> None:
    import mlflow

    folder = pod.folder / "export"
    folder.mkdir()
    written(Recipe.model_validate(pod.recipe), folder, base_model)
    served = mlflow.pyfunc.load_model(str(folder))
    assert served.metadata.get_input_schema().to_dict() == [{"type": "string", "required": True}]
    (said,) = served.predict(["What is the red house? "])
    assert isinstance(said, str)


def test_weights_go_back_into_the_type_of_the_base(pod: Pod, base_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(half)
    folder = pod.folder / "export"
    folder.mkdir()
    written(Recipe.model_validate(pod.but({"model.base": str(half)}).recipe), folder, half)
    assert AutoModelForCausalLM.from_pretrained(folder / "model").dtype == torch.bfloat16


def test_the_model_card_tells_where_the_model_comes_from(pod: Pod, table: Path, base_model: Path) -> None:
    recipe = Recipe.model_validate(pod.but({"register": {"model": "support"}}).recipe)
    assert recipe.data.splits is not None
    card = export.model_card(
        export.Lineage(recipe, recipe.data.splits, TrainResult(step=3, base_eval_loss=5.5, eval_loss=1.25))
    )
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": str(base_model),
    }
    assert f"FineTuneJob tests/tiny: 3 steps on {table} version 0." in body
    assert "| Evaluation loss before training | 5.5000 |\n| Evaluation loss | 1.2500 |\n" in body
    assert recipe.digest() in body


def test_an_unknown_target_module_is_refused_with_the_known_names(pod: Pod, base_model: Path) -> None:
    method = {"type": "LoRA", "lora": {"targetModules": ["q_proj", "qkv"]}}
    recipe = Recipe.model_validate(pod.but({"method": method}).recipe)
    model = models.load_model(recipe, base_model)
    with pytest.raises(RecipeRefusedError) as refused:
        models.adapt(model, recipe.method, recipe.model.base, seed=1)
    assert refused.value.message == (
        "method.lora.targetModules qkv is no linear layer of the model: it has down_proj, gate_proj, k_proj, "
        "lm_head, o_proj, q_proj, up_proj, v_proj"
    )


def test_a_base_that_cannot_be_used_is_refused(pod: Pod, base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    def sentence(changes: dict[str, Any]) -> str:
        recipe = Recipe.model_validate(pod.but(changes).recipe)
        with pytest.raises(RecipeRefusedError) as refused:
            models.load_model(recipe, Path(recipe.model.base))
        return refused.value.message.replace(str(tmp_path), "").replace(str(base_model), "BASE")

    assert sentence({"model.base": str(tmp_path / "empty")}).startswith(
        "model.base /empty cannot be loaded: Unrecognized model"
    )
    assert sentence({"training.maxLength": 512}) == (
        "training.maxLength 512 is above the 128 tokens that model.base BASE can take: lower it"
    )
