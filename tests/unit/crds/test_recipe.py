"""The recipe: what the pods of a job read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from finetune_crds import FineTuneJobSpec, JobRecipe, JobReference, Recipe, RecipeError
from finetune_crds.base import first_mistake
from finetune_crds.recipe import as_yaml
from finetune_crds.status import DataStatus

Json = dict[str, Any]
JOB = JobReference(name="tune", namespace="team", uid="u1")
BODY: Json = {
    "model": {"base": "/models/base"},
    "data": {
        "source": {"type": "Parquet", "path": "/data/corpus"},
        "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
        "prepare": {"output": "/data/splits"},
    },
    "register": {"model": "tuned"},
}


def recipe(reference: JobReference = JOB, **parts: Any) -> Recipe:
    return Recipe.of(reference, FineTuneJobSpec.model_validate(BODY | parts))


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    written = recipe(
        training={"maxSteps": 5, "learningRate": 1e-5},
        trainer={"parameters": {"mu": 0.1, "of": ["a", None]}},
        checkpoint={"uri": "/c"},
    )
    path.write_text(written.to_yaml(), encoding="utf-8")
    assert Recipe.load(path) == written
    assert written.parameters == {"mu": 0.1, "of": ["a", None]}


def test_every_character_of_a_text_comes_back() -> None:
    document = ["a\nb\n", " a ", "yes", "1e3", "'\"", "\u00fc", "\u0085", "\u2028", "\U0001f600", "\x07", ""]
    assert yaml.safe_load(as_yaml(document)) == document


def test_a_recipe_without_model_and_data_is_for_commands_alone(tmp_path: Path) -> None:
    spec = FineTuneJobSpec.model_validate({"trainer": {"command": ["t"], "parameters": {"mu": 1}}})
    path = tmp_path / "recipe.yaml"
    path.write_text(JobRecipe.of(JOB, spec).to_yaml(), encoding="utf-8")
    assert JobRecipe.load(path) == JobRecipe.of(JOB, spec)
    with pytest.raises(RecipeError, match="is invalid at model: Field required"):
        Recipe.load(path)


def test_a_spec_without_a_model_makes_no_recipe_of_the_built_in_commands() -> None:
    spec = FineTuneJobSpec.model_validate({"data": BODY["data"]})
    with pytest.raises(ValidationError) as raised:
        Recipe.of(JOB, spec)
    assert first_mistake(raised.value) == ("model", "Field required")


def test_the_digest_does_not_depend_on_who_reads_it() -> None:
    assert JobRecipe.of(JOB, FineTuneJobSpec.model_validate(BODY)).digest() == recipe().digest()


CANARY = "canary-3f9c"
PODS: Json = {
    "image": CANARY,
    "env": [{"name": "TOKEN", "value": CANARY}],
    "envFrom": [{"secretRef": {"name": CANARY}}],
    "template": {"metadata": {"annotations": {"a": CANARY}}},
}
CLUSTER: Json = {"sparkVersion": "17.3.x-scala2.13", "nodeType": "i3.xlarge", "env": {"TOKEN": CANARY}}
ON_DATABRICKS: Json = {
    "mode": "Databricks",
    "databricks": {
        "volume": "/Volumes/main/default/finetune",
        "compute": {"type": "NewCluster", "newCluster": CLUSTER},
    },
}
WITH_PODS: dict[str, Json] = {
    "a preparation on Databricks": {
        "data": {**BODY["data"], "prepare": {"output": "s3://b/splits", "spark": ON_DATABRICKS}}
    },
    **{
        f"pods.{role}": {"pods": {role: PODS}, "evaluation": {}}
        for role in ("all", "prepare", "train", "evaluate")
    },
}


@pytest.mark.parametrize("parts", WITH_PODS.values(), ids=WITH_PODS)
def test_nothing_of_the_variables_and_templates_of_pods_is_in_it(parts: Json) -> None:
    spec = FineTuneJobSpec.model_validate(BODY | parts)
    assert CANARY in str(spec.to_json())
    assert CANARY not in Recipe.of(JOB, spec).to_yaml()


def test_nothing_of_the_cluster_is_in_it() -> None:
    content = recipe(
        pods={"all": {"env": [{"name": "A", "value": "b"}]}, "train": {"image": "i", "template": {}}},
        runPolicy={"maxRestarts": 9},
        suspend=True,
        evaluation={"metrics": ["Accuracy"]},
    ).to_json()
    evaluation = content.pop("evaluation")
    assert evaluation["metrics"] == ["Accuracy"]
    assert set(content) == {
        "kind",
        "job",
        "model",
        "data",
        "method",
        "objective",
        "training",
        "distributed",
        "tracking",
        "register",
        "parameters",
    }


SAME: dict[str, Recipe] = {
    "another job": recipe(JobReference(name="other", namespace="other", uid="u2")),
    "another MLflow run": recipe(tracking={"runName": "other", "tags": {"a": "b"}}),
    "a default written out": recipe(training={"seed": 42}, method={"type": "Full"}),
    "a cache of models": recipe(model={"base": "/models/base", "cache": {"claimName": "models"}}),
    "what was prepared": recipe().model_copy(update={"prepared": DataStatus(digest="c0ffee")}),
    "an evaluation of its version": recipe(evaluation={"split": "Validation"}),
    "another cluster": recipe(runPolicy={"maxRestarts": 0}, pods={"train": {"template": {"spec": {}}}}),
    "another prep pod": recipe(**WITH_PODS["pods.prepare"]),
}
OTHER: dict[str, Recipe] = {
    "another seed": recipe(training={"seed": 43}),
    "another method": recipe(method={"type": "LoRA"}),
    "another source": recipe(data={**BODY["data"], "source": {"type": "Parquet", "path": "/other"}}),
    "another name for the model": recipe(register={"model": "other"}),
    "another parameter": recipe(trainer={"parameters": {"mu": "0.2"}}),
}


@pytest.mark.parametrize("other", SAME.values(), ids=SAME)
def test_recipes_that_do_the_same_have_the_same_digest(other: Recipe) -> None:
    assert other.digest() == recipe().digest()


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_recipes_that_do_something_else_have_another_digest(other: Recipe) -> None:
    assert other.digest() != recipe().digest()


def test_the_digest_survives_versions() -> None:
    # A change here changes the tag of every model that was ever registered.
    assert recipe().digest() == "a6bafea14e30"


WRONG: dict[str, tuple[str, str]] = {
    "no YAML": ("a: [", "the recipe {path} is not YAML: while parsing"),
    "empty": ("", "the recipe {path} is invalid at the top: "),
    "a list": ("- a", "the recipe {path} is invalid at the top: "),
    "a part missing": (
        "job: {name: a, namespace: b, uid: c}\ndata: {columns: {type: Text, text: t}}",
        "the recipe {path} is invalid at model: Field required",
    ),
    "a value out of range": (
        recipe().to_yaml().replace("nodes: 1", "nodes: 0"),
        "the recipe {path} is invalid at distributed.nodes: Input should be greater than or equal to 1",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_recipe_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        Recipe.load(path)
    assert str(raised.value).startswith(message.format(path=path))


UNREADABLE = {"no file": ("absent.yaml", "No such file or directory"), "a folder": (".", "Is a directory")}


@pytest.mark.parametrize(("name", "why"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_recipe_that_cannot_be_read_says_why(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(RecipeError) as raised:
        Recipe.load(tmp_path / name)
    assert str(raised.value) == f"the recipe {tmp_path / name} cannot be read: {why}"


def test_bytes_that_are_no_text_say_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RecipeError, match="is not text"):
        Recipe.load(path)
