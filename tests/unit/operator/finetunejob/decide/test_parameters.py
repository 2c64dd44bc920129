"""Strings in the parameters of commands that name what only a Databricks workspace has."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.decide import parameters
from fixtures.operator_in_memory.decisions import (
    CORRECTED,
    NO_MLFLOW,
    applied,
    conclude,
    failure_of,
    ftj,
    said,
    spec,
)

Json = dict[str, Any]
COMMAND: Json = {"command": ["torchrun", "train.py"]}
MODEL = "/Volumes/main/llm/model"


def mounted(path: str, container: str = "main") -> Json:
    """A pod template with a claim there."""
    mount = {"name": "lake", "mountPath": path}
    claim = {"name": "lake", "persistentVolumeClaim": {"claimName": "lake"}}
    spec = {"containers": [{"name": container, "volumeMounts": [mount]}], "volumes": [claim]}
    return {"train": {"template": {"spec": spec}}}


PATHS: dict[str, tuple[Json, list[str]]] = {
    "none": ({"trainer": COMMAND | {"parameters": {"output_dir": "/models", "of": "see /Volumes/a"}}}, []),
    "an own script's output_dir": (
        {"trainer": COMMAND | {"parameters": {"output_dir": MODEL}}},
        [f"spec.trainer.parameters.output_dir has {MODEL}"],
    ),
    "in lists and maps": (
        {"trainer": COMMAND | {"parameters": {"data": [{"path": "dbfs:/a"}, 5, "/dbfs/b"]}}},
        ["spec.trainer.parameters.data[0].path has dbfs:/a", "spec.trainer.parameters.data[2] has /dbfs/b"],
    ),
    "an option": (
        {"trainer": COMMAND | {"args": ["--epochs=3", f"--out={MODEL}"]}},
        [f"spec.trainer.args[1] has {MODEL}"],
    ),
    "many": (
        {"trainer": COMMAND | {"parameters": dict.fromkeys("abcde", MODEL)}},
        [*(f"spec.trainer.parameters.{name} has {MODEL}" for name in "abc"), "2 more"],
    ),
    "mounted": (
        {"trainer": COMMAND | {"parameters": {"output_dir": MODEL}}, "pods": mounted("/Volumes/main")},
        [],
    ),
    "mounted in another container": (
        {
            "trainer": COMMAND | {"parameters": {"output_dir": MODEL}},
            "pods": mounted("/Volumes/main", "other"),
        },
        [f"spec.trainer.parameters.output_dir has {MODEL}"],
    ),
    "of an evaluation": (
        {"evaluation": {"command": ["judge"], "parameters": {"cache": MODEL}}},
        [f"spec.evaluation.parameters.cache has {MODEL}"],
    ),
}


@pytest.mark.parametrize(("parts", "expected"), PATHS.values(), ids=PATHS)
def test_unmounted_paths(parts: Json, expected: list[str]) -> None:
    assert parameters.unmounted_paths(spec(**parts)) == expected


def test_a_job_with_such_a_path_runs_and_warns_until_it_is_mounted() -> None:
    trainer = COMMAND | {"parameters": {"output_dir": MODEL}}
    decision = conclude(ftj(trainer=trainer), settings=NO_MLFLOW)
    assert said(decision, ConditionType.ACCEPTED) == (
        "True",
        ConditionReason.ACCEPTED_WITH_WARNING,
        f"spec.trainer.parameters.output_dir has {MODEL}, a folder of a Databricks workspace, which pods read only from a mounted volume: "
        "mount a volume at the path in spec.pods, or create a FineTuneJob with another name and object storage; "
        "ignore this if the command accesses the workspace itself",
    )
    assert applied(decision)[-1] == "Job/tune-train-1"
    after = conclude(ftj(decision.status, trainer=trainer, pods=mounted(MODEL)), settings=NO_MLFLOW)
    assert said(after, ConditionType.ACCEPTED) == ("True", ConditionReason.ACCEPTED, "the spec can be run")


def test_a_secret_of_a_workspace_is_refused() -> None:
    trainer = COMMAND | {"parameters": {"hub": {"token": "{{secrets/hub/token}}"}}}
    assert failure_of(conclude(ftj(trainer=trainer), settings=NO_MLFLOW)) == (
        "True",
        ConditionReason.INVALID_SPEC,
        "spec.trainer.parameters.hub.token references a secret of a Databricks workspace, which pods cannot read: set a variable from a "
        "Kubernetes Secret with valueFrom or envFrom, and read that variable in the command",
    )
    assert CORRECTED in str(conclude(ftj(trainer=trainer), settings=NO_MLFLOW).status)
