"""Promotions on the real cluster: they promote, refuse, wait for a person, repair, and roll back.

They keep different aliases of one model, are applied together, and each test goes on with one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from demo.install import NAMESPACE, RELEASE, SYSTEM, Installation
from demo.kubectl import Json
from demo.promotions import at
from e2e.hand import Hand
from e2e.jobs import Jobs, Run, condition

MODEL = "promoted"
GOOD, WORSE, BETTER = 5.0, 5.9, 4.0
# Longer than the operator takes to start.
SECONDS_OF_SOAK = 20
NO_WORSE: Json = {
    "name": "no-worse",
    "type": "Comparison",
    "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"relative": 0.02}},
}
# A gate's Job reads the loss of the version from its MLflow run, and reports how far it is below 6.
MEASURED = """
import json, os
from mlflow import MlflowClient

client = MlflowClient()
version = client.get_model_version(os.environ["MODEL_NAME"], os.environ["MODEL_VERSION"])
loss = client.get_run(version.run_id).data.metrics["eval_loss"]
with open(os.environ["METRICS_PATH"], "w") as file:
    json.dump({"margin": 6 - loss}, file)
"""
# Promotions of the good version, by the alias that each keeps.
APPLIED: dict[str, Json] = {
    "gated": {"gates": [NO_WORSE]},
    "kept": {},
    "watched": {"onDrift": "Warn"},
    "back": {},
    "shared": {},
}


@dataclass
class Promotions:
    """The promotions that the module's tests applied, and the versions they are about."""

    installation: Installation
    jobs: Jobs
    good: str
    worse: str
    better: str
    names: list[str] = field(default_factory=list)

    def apply(self, **specs: Json) -> None:
        """Apply promotions by name; each keeps the alias of its own name."""
        bodies = [
            {
                "apiVersion": "finetune.dev/v1alpha1",
                "kind": "ModelPromotion",
                "metadata": {"name": name},
                "spec": {"model": MODEL, "alias": name, "onDelete": "RemoveAlias", **spec},
            }
            for name, spec in specs.items()
        ]
        self.names += specs
        self.installation.apply(yaml.safe_dump_all(bodies))

    def patch(self, name: str, **spec: Any) -> None:
        """Change its spec as `kubectl patch --type merge` does."""
        self.installation.patch("modelpromotion", name, spec)

    def reaches(self, name: str, reached: Callable[[Json], bool], **options: Any) -> Json:
        """Its status as soon as that holds."""
        return self.jobs.promotion(name, reached, **options)

    def restart_operator(self) -> None:
        """End the operator at once, as a node that dies does, and wait for the next."""
        label = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=operator"
        where = ("--namespace", SYSTEM, "--selector", label)
        self.installation.place.kubectl("delete", "pods", *where, "--grace-period=0", "--force", timeout=120)
        self.installation.wait_ready()

    def remove(self) -> None:
        """Delete what was applied; the aliases go too."""
        where = ("--namespace", NAMESPACE, "--ignore-not-found")
        self.installation.place.kubectl("delete", "modelpromotion", *self.names, *where, timeout=300)


@pytest.fixture(scope="module")
def promotions(run: Run, installation: Installation, jobs: Jobs, hand: Hand) -> Iterator[Promotions]:
    """Promotions of a good version; a worse and a better one were evaluated on the same data."""
    good, worse, better = hand.register(MODEL, run.status["mlflow"]["runId"], GOOD, WORSE, BETTER)
    applied = Promotions(installation, jobs, good, worse, better)
    try:
        applied.apply(
            **{
                name: {"source": {"type": "Version", "version": good}, **spec}
                for name, spec in APPLIED.items()
            }
        )
        for name in APPLIED:
            applied.reaches(name, at("Promoted", good))
        yield applied
    finally:
        applied.remove()


def moves(status: Json) -> list[tuple[str | None, str | None, str]]:
    """The history, oldest first."""
    return [
        (item.get("fromVersion"), item.get("toVersion"), item["reason"])
        for item in reversed(status["history"])
    ]


def after(count: int, reached: Callable[[Json], bool]) -> Callable[[Json], bool]:
    """The same once so many moves were made."""
    return lambda status: reached(status) and len(status["history"]) == count


def test_a_worse_version_is_refused_with_both_numbers(promotions: Promotions) -> None:
    good, better = promotions.good, promotions.better
    promotions.patch("gated", source={"type": "Version", "version": promotions.worse})
    status = promotions.reaches("gated", at("Refused", good))
    (verdict,) = status["gates"]["verdicts"]
    described = {name: verdict[name] for name in ("name", "verdict", "value", "limit", "holder")}
    assert described == {
        "name": "no-worse",
        "verdict": "Failed",
        "value": "5.9",
        "limit": "<= 5.1",
        "holder": "5",
    }
    assert condition(status, "GatesPassed")["reason"] == "GateFailed"
    promotions.patch("gated", source={"type": "Version", "version": better})
    status = promotions.reaches("gated", at("Promoted", better))
    assert moves(status) == [(None, good, "Promoted"), (good, better, "Promoted")]


def test_a_gate_that_runs_a_job_judges_by_its_numbers(
    promotions: Promotions, installation: Installation, jobs: Jobs
) -> None:
    good, worse = promotions.good, promotions.worse
    image = installation.place.trainer_image
    gates = [
        {"name": "tests", "type": "Job", "job": {"image": image, "command": ["python", "-c", MEASURED]}},
        {"name": "far", "type": "Metric", "metric": {"name": "margin", "min": 0.5, "job": "tests"}},
    ]
    promotions.apply(judged={"source": {"type": "Version", "version": good}, "gates": gates})
    status = promotions.reaches("judged", at("Promoted", good))
    promotions.patch("judged", source={"type": "Version", "version": worse})
    refused = promotions.reaches("judged", at("Refused", good))
    verdicts = {item["name"]: (item["verdict"], item.get("value")) for item in refused["gates"]["verdicts"]}
    assert verdicts == {"tests": ("Passed", None), "far": ("Failed", "0.1")}
    assert [item["version"] for item in refused["gateResults"]] == [worse, good]
    assert moves(status) == [(None, good, "Promoted")]


def test_an_approval_counts_for_its_version_alone(promotions: Promotions) -> None:
    good, worse = promotions.good, promotions.worse
    approvals = [{"version": worse, "by": "kim"}]
    source = {"type": "Version", "version": good}
    promotions.apply(approved={"source": source, "approval": {}, "approvals": approvals})
    status = promotions.reaches("approved", at("AwaitingApproval", None))
    assert f"spec.approvals names version {worse}" in condition(status, "Approved")["message"]
    promotions.patch("approved", approvals=[{"version": good, "by": "kim"}])
    status = promotions.reaches("approved", at("Promoted", good))
    assert [(item["toVersion"], item["by"]) for item in status["history"]] == [(good, "kim")]


def test_what_somebody_else_moves_is_put_back_or_warned_of(promotions: Promotions, hand: Hand) -> None:
    good, worse = promotions.good, promotions.worse
    for name in ("kept", "watched"):
        hand.move_alias(MODEL, name, worse)
    promotions.reaches("kept", after(2, at("Promoted", good)))
    status = promotions.reaches("watched", at("Blocked", worse))
    assert condition(status, "Drifted")["status"] == "True"
    assert condition(status, "Ready")["reason"] == "AliasMoved"
    hand.move_alias(MODEL, "kept", None)
    status = promotions.reaches("kept", after(3, at("Promoted", good)))
    assert moves(status) == [(None, good, "Promoted"), (worse, good, "Repaired"), (None, good, "Repaired")]
    aliases = hand.aliases(MODEL)
    assert (aliases["kept"], aliases["watched"]) == (good, worse)


def test_a_soak_and_a_rollback_go_on_over_a_restart_of_the_operator(
    promotions: Promotions, hand: Hand
) -> None:
    good, better = promotions.good, promotions.better
    promotions.patch("back", source={"type": "Version", "version": better})
    promotions.reaches("back", at("Promoted", better))
    promotions.patch("back", rollbackTo={"type": "Previous"})
    promotions.reaches("back", at("Promoted", good))
    promotions.apply(soaked={"source": {"type": "Version", "version": good}, "soakSeconds": SECONDS_OF_SOAK})
    until = datetime.fromisoformat(promotions.reaches("soaked", at("Soaking", None))["soak"]["endTime"])
    promotions.restart_operator()

    hand.move_alias(MODEL, "back", better)
    status = promotions.reaches("back", after(4, at("Promoted", good)))
    assert status["rollback"] == {"requested": "Previous", "version": good}
    promotions.patch("back", rollbackTo=None)
    status = promotions.reaches("back", at("Promoted", better))
    assert moves(status)[:4] == [
        (None, good, "Promoted"),
        (good, better, "Promoted"),
        (better, good, "RolledBack"),
        (better, good, "Repaired"),
    ]

    (move,) = promotions.reaches("soaked", at("Promoted", good))["history"]
    assert datetime.fromisoformat(move["time"]) >= until
    assert datetime.now(UTC) >= until


def test_two_promotions_of_one_alias_do_not_fight(promotions: Promotions) -> None:
    good, worse = promotions.good, promotions.worse
    promotions.apply(rival={"alias": "shared", "source": {"type": "Version", "version": worse}})
    status = promotions.reaches("rival", lambda status: status.get("phase") == "Blocked")
    accepted = condition(status, "Accepted")
    assert accepted["reason"] == "Conflict"
    assert f"{NAMESPACE}/shared is older" in accepted["message"]
    assert promotions.reaches("shared", at("Promoted", good))
    # With the older one goes the alias; the younger one then has it.
    promotions.installation.delete("modelpromotion", "shared")
    promoted = promotions.reaches("rival", at("Promoted", worse), stuck=())
    assert moves(promoted) == [(None, worse, "Promoted")]
