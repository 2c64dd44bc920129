"""The quickstart, with fewer steps: from raw text to a registered model that answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from demo import results
from demo.install import NAMESPACE, RELEASE, SYSTEM, Installation
from e2e.hand import Hand, reaching
from e2e.jobs import SPLITS, STEPS, Jobs, Run
from e2e.stories import Stage
from support.canary import CANARY, read_files, read_objects, select_leaks

PHASES = ["Pending", "Preparing", "Starting", "Training", "Registering", "Succeeded"]


@dataclass(frozen=True)
class Loaded:
    """What the registered model is like, loaded by its alias."""

    loss: float
    answer: str
    answer_in_pod: str


def run_story(stage: Stage) -> Loaded:
    """Run the quickstart, and load its model in a pod and on this machine."""
    run = stage.quickstart()
    answer_in_pod = results.ask(stage.installation, run.job)
    model, data = run.status["model"], run.status["data"]
    uri = f"models:/{model['name']}@candidate"
    with reaching(stage.installation) as hand:
        loss, answer = hand.loss_and_answer_of(uri, data["path"], data["version"], results.QUESTION)
    return Loaded(loss, answer, answer_in_pod)


def test_phases_come_in_order(run: Run) -> None:
    phases = [status.get("phase") or "Pending" for status in run.statuses]
    distinct = [phase for before, phase in pairwise(["", *phases]) if phase != before]
    assert distinct == [phase for phase in PHASES if phase in distinct]
    assert {"Preparing", "Training", "Succeeded"} <= set(distinct)


def test_progress_rises_and_loss_falls(run: Run) -> None:
    steps = run.over_time("step")
    assert steps == sorted(steps)
    assert len(steps) >= 3
    assert run.status["progress"]["step"] == STEPS
    losses = run.over_time("loss")
    assert losses[-1] < losses[0] - 0.5


def test_evaluation_loss_is_well_below_that_of_the_base_model(run: Run) -> None:
    model = run.status["model"]
    assert model["evalLoss"] < model["baseEvalLoss"] - 0.5


def test_table_run_and_version_name_each_other(run: Run, hand: Hand) -> None:
    status = run.status
    data, model, run_id = status["data"], status["model"], status["mlflow"]["runId"]
    splits = hand.table(data["path"], data["version"]).to_pyarrow_table(columns=["split"])["split"]
    assert Counter(splits.to_pylist()) == data["rows"]
    tracked_run = hand.mlflow.get_run(run_id)
    version = hand.mlflow.get_model_version_by_alias(model["name"], "candidate")
    assert (tracked_run.info.status, str(version.version), version.run_id) == (
        "FINISHED",
        model["version"],
        run_id,
    )
    files = {file.path for file in hand.mlflow.list_artifacts(run_id, "preparation")}
    assert files == {f"preparation/{name}" for name in ("report.html", "funnel.png", "tokens.png")}
    tags = {
        "finetune_data_path": SPLITS,
        "finetune_data_version": str(data["version"]),
        "finetune.dev/job": "demo/quickstart",
        "finetune.dev/uid": run.job["metadata"]["uid"],
    }
    assert tags.items() <= tracked_run.data.tags.items()
    assert float(version.tags["eval_loss"]) == pytest.approx(model["evalLoss"], abs=1e-3)


def test_registered_model_loads_by_its_alias_and_has_learned(run: Run, story: Loaded) -> None:
    # That of the base model is higher by far: see above.
    assert story.loss == pytest.approx(run.status["model"]["evalLoss"], rel=0.02)


def test_registered_model_answers_in_a_pod(run: Run, story: Loaded) -> None:
    """As the version does whose loss is judged above."""
    assert story.answer_in_pod == story.answer
    model = run.status["model"]
    assert model["uri"] == f"models:/{model['name']}/{model['version']}"


def test_values_of_variables_stay_in_the_pods(
    run: Run, jobs: Jobs, installation: Installation, hand: Hand, tmp_path: Path
) -> None:
    """The job has a variable with a value that is nowhere else: no object, no log and no file may show it."""
    kubectl, selector = installation.place.kubectl, "finetune.dev/job=quickstart"
    pods = kubectl.items("pods", "--namespace", NAMESPACE, "--selector", selector)
    assert pods
    assert all(CANARY in str(pod["spec"]) for pod in pods)
    selectors = {"jobs": (NAMESPACE, selector), "operator": (SYSTEM, f"app.kubernetes.io/instance={RELEASE}")}
    logs = {
        f"logs of {name}": kubectl(
            "logs", "--namespace", namespace, "--selector", labels, "--all-containers", "--tail=-1"
        )
        for name, (namespace, labels) in selectors.items()
    }
    model, run_id = run.status["model"], run.status["mlflow"]["runId"]
    hand.download(model["uri"], tmp_path)
    tracked = {
        "run": str(hand.mlflow.get_run(run_id).to_dictionary()),
        "version": str(dict(hand.mlflow.get_model_version(model["name"], model["version"]))),
    }
    files = read_files(tmp_path)
    assert any(name.endswith("README.md") for name in files)
    assert select_leaks(read_objects(jobs.api, NAMESPACE) | logs | tracked | files) == []


def test_nothing_but_the_job_says_how_it_went(run: Run, installation: Installation) -> None:
    table = installation.place.kubectl("get", "ftj", "quickstart", "--namespace", "demo")
    header, row = table.splitlines()
    assert header.split() == ["NAME", "PHASE", "REASON", "PROGRESS", "LOSS", "MODEL", "AGE"]
    assert "Succeeded" in row
    assert len(row) <= 90
