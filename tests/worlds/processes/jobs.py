"""FineTuneJobs for tests."""

from __future__ import annotations

import copy
from typing import Any

from finetune_crds.contract import PodError, PrepResult, TerminationMessage, TrainResult
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.status import SplitCounts

Json = dict[str, Any]

_JOB: Json = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "tune"},
    "spec": {
        "model": {"base": "/models/base"},
        "data": {
            "source": {"type": "Parquet", "path": "/data/corpus"},
            "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
            "prepare": {"output": "/data/splits"},
        },
        "training": {"maxSteps": 100},
        "distributed": {"nodes": 2, "processesPerNode": 2},
        "checkpoint": {"uri": "/checkpoints"},
        "register": {"model": "tuned"},
    },
}

PREPARED = TerminationMessage(
    prep=PrepResult(
        rows=SplitCounts(train=900, validation=50, test=50),
        tokens=SplitCounts(train=90000, validation=5000, test=5000),
        path="/data/splits",
        version=7,
    )
)
TRAINED = TerminationMessage(
    train=TrainResult(step=100, base_eval_loss=5.0, eval_loss=2.0, perplexity=7.389, goodput=0.9)
)

EVALUATED = TerminationMessage(
    evaluation=EvaluationResult(
        rows=50, digest="d1", metrics={"eval_accuracy": 0.75}, base={"eval_accuracy": 0.5}
    )
)


def error(reason: str, message: str) -> TerminationMessage:
    """What a pod that failed leaves."""
    return TerminationMessage(error=PodError(reason=reason, message=message))


def job(name: str = "tune", **spec: Any) -> Json:
    """A complete FineTuneJob; parts of the spec replaced, or left out with None."""
    body = copy.deepcopy(_JOB)
    body["metadata"]["name"] = name
    body["spec"] = {key: value for key, value in (body["spec"] | spec).items() if value is not None}
    return body


def splits_given(name: str = "tune", **spec: Any) -> Json:
    """A FineTuneJob whose splits are prepared already."""
    data = {
        "splits": {"type": "Delta", "path": "/data/splits", "version": 3},
        "columns": {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
    }
    return job(name, **({"data": data} | spec))
