"""What a recipe lacks that the spec of a job may leave to the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.contract import ENV_RECIPE
from finetune_crds.recipe import Recipe
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.runtime.recipe import load_recipe

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod

BEST = {"training.select": "Best", "training.evalEverySteps": 2}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "splits": (
        {"data.splits": None},
        "data.splits is missing: training reads prepared splits",
    ),
    "checkpoints of the best step": (
        BEST,
        "training.select: Best needs checkpoint: the best checkpoint is registered",
    ),
    "no checkpoints": ({**BEST, "checkpoint": {"uri": "/checkpoints"}}, None),
    "the folder of another job": (
        {"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Job", "name": "a"}}},
        "checkpoint.resumeFrom in a recipe needs type Uri and uri: a pod cannot look up the jobs of a cluster",
    ),
    "no folder": ({"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Uri", "uri": "/c/a"}}}, None),
    # The API server refuses it, unless it accepted the job before it had the rule.
    "no rule of the spec": ({"training.epochs": 1, "training.maxSteps": 2, "method.lora": {}}, None),
}


@pytest.mark.parametrize(("changes", "message"), CASES.values(), ids=CASES)
def test_what_a_recipe_lacks_is_refused_by_name(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str | None
) -> None:
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    monkeypatch.setenv(ENV_RECIPE, str(path))
    if message is None:
        assert load_recipe() == recipe
        return
    with pytest.raises(RecipeRefusedError) as refused:
        load_recipe()
    assert refused.value.message == message
