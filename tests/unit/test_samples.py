"""Which samples run today, and for which parts exactly the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from finetune_crds import FineTuneJob, ModelPromotion
from finetune_operator.finetunejob.decide.accept import not_implemented, reserved_env
from finetune_operator.modelpromotion.decide import accept as promotion
from finetune_operator.policy.address import passwords
from finetune_operator.settings import Settings

SAMPLES = Path(__file__).parents[2] / "crds" / "samples"
INSTALLED = Settings(tracking_uri="http://mlflow:5000")

REFUSED = {
    "air-cli": ["data.source.type Hub (copy the data set to a folder and use Parquet or JSONLines)"],
    "databricks-notebook": [
        "data.prepare.spark.mode Databricks (use Local)",
        "tracking.uri databricks (use the http or https address of an MLflow server)",
        "tracking.registryUri databricks-uc (use the http or https address of an MLflow server)",
    ],
}


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_is_refused_for_what_comes_later_and_nothing_else(sample: Path) -> None:
    for part in yaml.safe_load_all(sample.read_text(encoding="utf-8")):
        if part["kind"] == "FineTuneJob":
            spec = FineTuneJob.model_validate(part).spec
            assert [*passwords(spec.tracking), *reserved_env(spec)] == []
            assert [*not_implemented(spec)] == REFUSED.get(sample.stem, [])
        if part["kind"] == "ModelPromotion":
            assert [*promotion.mistakes(ModelPromotion.model_validate(part).spec, INSTALLED)] == []
