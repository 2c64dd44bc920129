"""Over all attempts of a job, the folder of output.uri and the registered version are the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_crds.contract import TrainResult
from finetune_crds.data import Splits
from finetune_crds.recipe import Recipe
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.pod.exit_status import RecipeRefusedError, SupersededError, TrainingError
from finetune_trainer.train.delivery import lineage, output
from finetune_trainer.train.delivery.deliver import deliver
from finetune_trainer.train.delivery.register import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.training import Mlflow

pytestmark = pytest.mark.usefixtures("mlflow_imported")


def attempted(
    tmp_path: Path,
    number: int,
    run_id: str | None,
    upload: str | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> TrainResult:
    """An attempt, whose weights are its number, that has trained to the end and delivers its model."""
    recipe = Recipe.model_validate(
        {
            "job": {"name": "tiny", "namespace": "tests", "uid": "0001"},
            "model": {"base": "org/base"},
            "data": {"splits": {"type": "Delta", "path": "/splits"}},
            "output": {"uri": str(tmp_path / "output")},
            "register": {"model": "tiny", "upload": upload} if run_id else None,
        }
    )
    model_lineage = lineage.Lineage(
        recipe, Splits(type="Delta", path="/splits"), TrainResult(step=number, eval_loss=number)
    )

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_text(str(number))

    to = output.folder_of(recipe)
    assert to is not None
    to.claim()
    export = tmp_path / f"export-{number}"
    return deliver(
        model_lineage, run_id, export, write, Origin("org/base"), say=lambda _: None, confirm=confirm
    )


def weights(tmp_path: Path) -> str:
    return (tmp_path / "output" / "model.safetensors").read_text()


def test_an_attempt_whose_pod_was_lost_is_repeated(tmp_path: Path) -> None:
    assert [attempted(tmp_path, number, None).eval_loss for number in (1, 2)] == [1, 2]
    assert weights(tmp_path) == "2"


def test_a_refusal_of_the_registry_is_not_tried_again(
    tmp_path: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    with pytest.raises(RecipeRefusedError) as refused:
        Registry(mlflow.run_id, None).register("team/support", "m-1", tmp_path, {})
    assert (refused.value.reason, refused.value.exit_code) == ("RegistrationRefused", 64)
    assert "Invalid model name 'team/support'" in refused.value.message


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_pods_that_newer_ones_have_replaced_deliver_nothing_more(
    tmp_path: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """They look before they write the folder, upload the model and register it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    confirmations = iter([*[None] * (calls - 1), SupersededError("newer pods claimed the folder")])

    def confirm() -> None:
        error = next(confirmations)
        if error is not None:
            raise error

    with pytest.raises(SupersededError):
        attempted(tmp_path, 1, mlflow.run_id, confirm=confirm)
    assert (tmp_path / "output" / "model.safetensors").exists() == (calls > 1)
    assert bool([*(tmp_path / "artifacts").rglob("model.safetensors")]) == (calls > 2)
    assert [*mlflow.client().search_model_versions("name='tiny'")] == []


def test_an_attempt_whose_upload_failed_is_repeated(
    tmp_path: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise TrainingError("MlflowUnreachable", "no route")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    with monkeypatch.context() as failing:
        failing.setattr(Registry, "upload", away)
        with pytest.raises(TrainingError):
            attempted(tmp_path, 1, mlflow.run_id)
    assert weights(tmp_path) == "1"
    # The third finds what the second has registered.
    versions = [attempted(tmp_path, number, mlflow.run_id).model_version for number in (2, 3)]
    assert (versions, weights(tmp_path)) == (["1", "1"], "2")
    (uploaded,) = (tmp_path / "artifacts").rglob("model.safetensors")
    assert uploaded.read_text() == "2"


def test_the_server_is_asked_for_the_way_of_the_upload_before_it(
    tmp_path: Path, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    with pytest.raises(
        RecipeRefusedError, match=r"register\.upload Proxy requires an MLflow server that serves artifacts"
    ):
        attempted(tmp_path, 1, mlflow.run_id, "Proxy")
    assert not [*(tmp_path / "artifacts").rglob("model.safetensors")]
