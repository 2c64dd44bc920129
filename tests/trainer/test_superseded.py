"""Pods that newer ones of the job replace while they run: they write nothing more, and end with 75."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.contract import ENV_ATTEMPT, EXIT_PREEMPTED
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
from finetune_trainer.train.checkpoint.claim import MANIFEST, Claim, build_token
from finetune_trainer.train.checkpoint.kept_reference import KeptReference
from finetune_trainer.train.data import dataset
from finetune_trainer.train.delivery import export
from support.checkpoints import complete_steps
from support.training import error_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod

# MLflow modules warn about each other while the export imports them.
pytestmark = pytest.mark.usefixtures("mlflow_imported")


@dataclass(frozen=True)
class Moment:
    """When newer pods claim the folder, and what the replaced ones leave.

    owner, name: the call after which the newer pods claim it.
    kinds: what is in the folder at the end, beside the manifest.
    steps: the complete checkpoints at the end.
    """

    owner: Any
    name: str
    kinds: set[str] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    objective: str = "SFT"


MOMENTS = {
    "before tokens are stored": Moment(dataset, "tokenize"),
    "before a reference is stored": Moment(KeptReference, "load", {"tokens"}, objective="DPO"),
    "before a save is published": Moment(Checkpointer, "_write_shards", {"tokens"}),
    "before the model is delivered": Moment(export, "gather_weights", {"tokens", "step"}, [20, 40]),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_replaced_pods_write_nothing_more(
    moment: Moment,
    pod: Pod,
    preferences: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoints, model = pod.folder / "checkpoints", pod.folder / "model"
    pod = pod.but(
        {
            "training.maxSteps": 40,
            "checkpoint": {"uri": str(checkpoints), "everySteps": 20},
            "output": {"uri": str(model)},
        }
    )
    if moment.objective == "DPO":
        pod = pod.but(
            {
                "objective": {"type": "DPO"},
                "data.splits.path": str(preferences),
                "data.columns": {"type": "Preference"},
            }
        )
    pod.env[ENV_ATTEMPT] = "1"
    call = getattr(moment.owner, moment.name)

    def interrupted(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        (folder,) = checkpoints.iterdir()
        Claim(str(folder), 2, build_token(2)).confirm()
        return result

    monkeypatch.setattr(moment.owner, moment.name, interrupted)
    outcome = pod.run_here(capsys)
    assert (outcome.code, error_of(outcome).reason) == (EXIT_PREEMPTED, "Superseded"), outcome.output
    # A save in the background ends the loop before the next save.
    assert max(outcome.losses, default=0) in ({40} if moment.steps else {0, *range(20, 30)})
    (folder,) = checkpoints.iterdir()
    files = [path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()]
    assert {part.split("-")[0] for part in files} == {*moment.kinds, MANIFEST}
    assert complete_steps(checkpoints) == moment.steps
    assert not [*model.glob("*.safetensors")]
