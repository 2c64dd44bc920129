"""The FineTuneJobs of a sweep."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.status import MlflowStatus, Pinned
from finetune_operator.finetunejob.sweep import objects
from fixtures.operator_in_memory.decisions import NODES, SPLITS, UID, ftj, status

Json = dict[str, Any]
SWEEP: Json = {
    "parameters": [
        {"field": "training.learningRate", "values": [1e-4, 1e-3]},
        {"field": "method.lora.rank", "values": [8]},
    ],
    "algorithm": "Grid",
}
VALUES: Json = {"training.learningRate": 1e-3, "method.lora.rank": 8}
METHOD: Json = {"type": "LoRA", "lora": {"alpha": 32.0}}
TEMPLATE: Json = {"spec": {"nodeSelector": {"pool": "gpu"}}}
PARENT: Json = {
    "sweep": SWEEP,
    "method": METHOD,
    "model": {"base": "models:/base@champion"},
    "tracking": {"runName": "rates", "tags": {"team": "nlp"}},
    "register": {"aliases": ["candidate"]},
    "output": {"uri": "s3://bucket/model"},
    "evaluation": {"split": "Test"},
    "checkpoint": {"everySteps": 10},
    "runPolicy": {"activeDeadlineSeconds": 60, "queueName": "gpus"},
    "pods": {"train": {"template": TEMPLATE}, "evaluate": {"image": "mine"}},
    "suspend": False,
}
PINNED = status(
    pinned=Pinned(base="models:/base/3"), mlflow=MlflowStatus(experiment_id="e1", run_id="r1", url="http://m")
)
TRIAL_SPEC: Json = {
    "model": {"base": "models:/base/3"},
    "data": SPLITS,
    "distributed": NODES,
    "method": {"type": "LoRA", "lora": {"alpha": 32.0, "rank": 8}},
    "training": {"learningRate": 1e-3},
    "tracking": {"runName": "rates-2", "tags": {"team": "nlp", "mlflow.parentRunId": "r1"}},
    "checkpoint": {"everySteps": 10},
    "runPolicy": {"queueName": "gpus"},
    "pods": {"train": {"template": TEMPLATE}},
}


def test_a_trial_is_the_job_with_other_values_and_delivers_nothing() -> None:
    assert objects.build_trial(ftj(PINNED, **PARENT), 2, VALUES) == {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": "tune-2",
            "namespace": "team",
            "labels": {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/sweep": "tune"},
            "ownerReferences": [
                {
                    "apiVersion": "finetune.dev/v1alpha1",
                    "kind": "FineTuneJob",
                    "name": "tune",
                    "uid": UID,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": TRIAL_SPEC,
    }


def test_the_best_job_continues_from_the_trial_and_delivers() -> None:
    body = objects.build_best(ftj(PINNED, **PARENT), 2, VALUES, step=60)
    assert body["metadata"]["name"] == "tune-best"
    assert body["spec"] == TRIAL_SPEC | {
        "tracking": TRIAL_SPEC["tracking"] | {"runName": "rates-best"},
        "register": {"aliases": ["candidate"], "model": "tune"},
        "output": PARENT["output"],
        "evaluation": PARENT["evaluation"],
        "checkpoint": {"everySteps": 10, "resumeFrom": {"type": "Job", "name": "tune-2"}},
        "pods": PARENT["pods"],
    }


def test_the_best_job_takes_no_step_after_an_early_stop() -> None:
    training = {"epochs": 3, "evalEverySteps": 10, "earlyStopping": {"patience": 2}}
    body = objects.build_best(ftj(**PARENT | {"training": training}), 2, VALUES, step=40)
    assert body["spec"]["training"] == {"evalEverySteps": 10, "learningRate": 1e-3, "maxSteps": 40}


def test_without_a_run_and_settings_nothing_is_added() -> None:
    body = objects.build_trial(ftj(sweep=SWEEP), 1, {"training.seed": 7})
    assert body["spec"] == {
        "model": {"base": "/models/base"},
        "data": SPLITS,
        "distributed": NODES,
        "training": {"seed": 7},
    }


NEW_POLICY: Json = {"queueName": "gpus", "maxRestarts": 9}
# How the parent differs from PARENT, whether the child is to be suspended, and what changes in the child.
CHANGES: dict[str, tuple[Json, bool, Json]] = {
    "nothing": ({}, False, {}),
    "suspend": ({}, True, {"suspend": True}),
    "the deadline": ({"runPolicy": {"activeDeadlineSeconds": 99, "queueName": "gpus"}}, False, {}),
    "a policy": ({"runPolicy": NEW_POLICY}, False, {"runPolicy": NEW_POLICY}),
    "pods": (
        {"pods": {"train": {"image": "new"}}},
        False,
        {"pods": {"train": {"image": "new"}}},
    ),
    "no pods": ({"pods": None}, False, {"pods": {}}),
    "pods of the evaluation": (
        {"pods": {"train": {"template": TEMPLATE}, "evaluate": {"image": "new"}}},
        False,
        {},
    ),
}


@pytest.mark.parametrize(("parent", "is_suspended", "changes"), CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_trial_with_its_parent(parent: Json, changes: Json, *, is_suspended: bool) -> None:
    trial = objects.build_trial(ftj(PINNED, **PARENT), 2, VALUES)
    # As the API server completes it.
    trial["spec"] = {**trial["spec"], "suspend": False}
    trial["spec"]["runPolicy"] = {"maxRestarts": 3, **trial["spec"]["runPolicy"]}
    followed = objects.build_followed_fields(
        ftj(PINNED, **PARENT | parent), delivers=False, is_suspended=is_suspended
    )
    assert objects.list_changes(trial, followed) == changes
