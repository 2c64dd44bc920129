"""Promotions on the real cluster: they promote, refuse, wait for a person, repair, and roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from demo import promotions
from demo.install import NAMESPACE, RELEASE, SYSTEM, Installation
from demo.kubectl import Json
from demo.promotions import at, current, follow
from e2e.hand import by_hand
from e2e.jobs import Run

MODEL = "promoted"
GOOD, WORSE, BETTER = 5.0, 5.9, 4.0
NO_WORSE: Json = {
    "name": "no-worse",
    "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"relative": 0.02}},
}


@dataclass
class Promotions:
    """The promotions that a test applied, and what a person does in MLflow meanwhile."""

    installation: Installation
    names: list[str] = field(default_factory=list)

    def apply(self, name: str, **spec: Any) -> None:
        """Apply a promotion that keeps the alias of its own name."""
        body = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "ModelPromotion",
            "metadata": {"name": name},
            "spec": {"model": MODEL, "alias": name, "onDelete": "RemoveAlias", **spec},
        }
        self.names.append(name)
        self.installation.terminal.say(f"\n        {name}")
        self.installation.apply(yaml.safe_dump(body))

    def patch(self, name: str, **spec: Any) -> None:
        """Change its spec as `kubectl patch --type merge` does."""
        self.installation.patch("modelpromotion", name, spec)

    def reaches(self, name: str, reached: Callable[[Json], bool]) -> Json:
        """Its status as soon as that holds."""
        status: Json = follow(self.installation, name, reached)["status"]
        return status

    def restart_operator(self) -> None:
        """End the operator at once, as a node that dies does, and wait for the next."""
        label = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=operator"
        where = ("--namespace", SYSTEM, "--selector", label)
        self.installation.place.kubectl("delete", "pods", *where, "--grace-period=0", "--force", timeout=120)
        self.installation.wait_ready()

    def remove(self) -> None:
        """Delete what was applied; the aliases go too."""
        for name in self.names:
            self.installation.delete("modelpromotion", name)


@pytest.fixture
def applied(run: Run, installation: Installation) -> Iterator[Promotions]:
    """Promotions that are gone after the test."""
    found = Promotions(installation)
    yield found
    found.remove()


@pytest.fixture(scope="module")
def versions(run: Run, installation: Installation) -> tuple[str, str, str]:
    """A good version, a worse one and a better one, all evaluated on the quickstart's data."""
    run_id = run.status["mlflow"]["runId"]
    losses = (str(loss) for loss in (GOOD, WORSE, BETTER))
    good, worse, better = by_hand(installation, "register", MODEL, run_id, *losses)
    return good, worse, better


def moves(status: Json) -> list[tuple[str | None, str | None, str]]:
    """The history, oldest first."""
    return [
        (item.get("fromVersion"), item.get("toVersion"), item["reason"])
        for item in reversed(status["history"])
    ]


def after(count: int, reached: Callable[[Json], bool]) -> Callable[[Json], bool]:
    """The same once so many moves were made."""
    return lambda status: reached(status) and len(status["history"]) == count


def condition(status: Json, kind: str) -> Json:
    return next(item for item in status["conditions"] if item["type"] == kind)


def test_the_quickstarts_version_becomes_champion(run: Run, installation: Installation) -> None:
    version = run.status["model"]["version"]
    promotions.forget(installation)  # of a cluster that was kept
    promotions.promote(installation, version)
    found = by_hand(installation, "show", "docstring-llama")
    names = ("candidate", "staging", "champion")
    assert {name: found["aliases"].get(name) for name in names} == dict.fromkeys(names, version)
    tags = found["tags"][version]
    assert (tags["promoted_alias"], tags["promoted_by"], tags["service"]) == ("champion", "you", "docstrings")
    text = "\n".join(promotions.summary(installation))
    header, *rows = text.partition("The promotions\n")[2].splitlines()[:3]
    columns = ["NAME", "MODEL", "ALIAS", "PHASE", "CURRENT", "CANDIDATE", "GATES", "AGE"]
    assert header.split() == columns
    assert [row.split()[:5] for row in rows] == [
        [name, "docstring-llama", name, "Promoted", version] for name in promotions.NAMES
    ]
    promotions.forget(installation)
    assert set(by_hand(installation, "show", "docstring-llama")["aliases"]) == {"candidate"}


def test_a_worse_version_is_refused_with_both_numbers(
    applied: Promotions, versions: tuple[str, str, str]
) -> None:
    good, worse, better = versions
    applied.apply("gated", source={"version": good}, gates=[NO_WORSE])
    applied.reaches("gated", at("Promoted", good))
    applied.patch("gated", source={"version": worse})
    status = applied.reaches("gated", at("Refused", good))
    (verdict,) = status["gates"]["verdicts"]
    said = {name: verdict[name] for name in ("name", "verdict", "value", "limit", "holder")}
    assert said == {
        "name": "no-worse",
        "verdict": "Failed",
        "value": "5.9",
        "limit": "<= 5.1",
        "holder": "5",
    }
    assert condition(status, "GatesPassed")["reason"] == "GateFailed"
    applied.patch("gated", source={"version": better})
    status = applied.reaches("gated", at("Promoted", better))
    assert moves(status) == [(None, good, "Promoted"), (good, better, "Promoted")]


def test_an_approval_counts_for_its_version_alone(
    applied: Promotions, versions: tuple[str, str, str]
) -> None:
    good, worse, _ = versions
    applied.apply("approved", source={"version": good}, approval={"version": worse})
    status = applied.reaches("approved", at("AwaitingApproval", None))
    assert f"approval.version {worse} is not it" in condition(status, "Approved")["message"]
    applied.patch("approved", approval={"version": good, "by": "kim"})
    status = applied.reaches("approved", at("Promoted", good))
    assert [(item["toVersion"], item["by"]) for item in status["history"]] == [(good, "kim")]


def test_what_somebody_else_moves_is_put_back(applied: Promotions, versions: tuple[str, str, str]) -> None:
    good, worse, _ = versions
    applied.apply("kept", source={"version": good})
    applied.reaches("kept", at("Promoted", good))
    for number, moved in enumerate((worse, "none"), start=1):
        by_hand(applied.installation, "alias", MODEL, "kept", moved)
        status = applied.reaches("kept", after(1 + number, at("Promoted", good)))
        assert status["history"][0]["reason"] == "Repaired"
    assert moves(status) == [(None, good, "Promoted"), (worse, good, "Repaired"), (None, good, "Repaired")]
    assert by_hand(applied.installation, "show", MODEL)["aliases"]["kept"] == good


def test_a_move_that_is_only_warned_of_stays(applied: Promotions, versions: tuple[str, str, str]) -> None:
    good, worse, _ = versions
    applied.apply("watched", source={"version": good}, onDrift="Warn")
    applied.reaches("watched", at("Promoted", good))
    by_hand(applied.installation, "alias", MODEL, "watched", worse)
    status = applied.reaches("watched", at("Drifted", worse))
    assert condition(status, "Drifted")["status"] == "True"
    assert by_hand(applied.installation, "show", MODEL)["aliases"]["watched"] == worse


def test_one_line_rolls_back_and_holds_until_it_is_taken_out(
    applied: Promotions, versions: tuple[str, str, str]
) -> None:
    good, _, better = versions
    applied.apply("back", source={"version": good})
    applied.reaches("back", at("Promoted", good))
    applied.patch("back", source={"version": better})
    applied.reaches("back", at("Promoted", better))
    applied.patch("back", rollbackTo="Previous")
    applied.reaches("back", at("RolledBack", good))
    applied.restart_operator()
    by_hand(applied.installation, "alias", MODEL, "back", better)
    status = applied.reaches("back", after(4, at("RolledBack", good)))
    assert status["rollback"] == {"requested": "Previous", "version": good}
    applied.patch("back", rollbackTo=None)
    status = applied.reaches("back", at("Promoted", better))
    assert moves(status)[:4] == [
        (None, good, "Promoted"),
        (good, better, "Promoted"),
        (better, good, "RolledBack"),
        (better, good, "Repaired"),
    ]


def test_a_soak_goes_on_over_a_restart_of_the_operator(
    applied: Promotions, versions: tuple[str, str, str]
) -> None:
    good = versions[0]
    applied.apply("soaked", source={"version": good}, soakSeconds=20)
    until = applied.reaches("soaked", at("Soaking", None))["soak"]["until"]
    applied.restart_operator()
    status = applied.reaches("soaked", at("Promoted", good))
    (move,) = status["history"]
    assert datetime.fromisoformat(move["at"]) >= datetime.fromisoformat(until)
    assert datetime.now(UTC) >= datetime.fromisoformat(until)


def test_two_promotions_of_one_alias_do_not_fight(
    applied: Promotions, versions: tuple[str, str, str]
) -> None:
    good, worse, _ = versions
    applied.apply("shared", source={"version": good})
    applied.reaches("shared", at("Promoted", good))
    applied.apply("rival", alias="shared", source={"version": worse})
    kubectl = applied.installation.place.kubectl
    deadline = time.monotonic() + 60
    while True:
        found = kubectl.get("modelpromotion", "rival", "--namespace", NAMESPACE) or {}
        if current(found) and found["status"].get("phase") == "Conflict":
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert f"{NAMESPACE}/shared is older" in condition(found["status"], "Accepted")["message"]
    assert applied.reaches("shared", at("Promoted", good))
    # With the older one goes the alias; the younger one then has it.
    applied.installation.delete("modelpromotion", "shared")
    assert moves(applied.reaches("rival", at("Promoted", worse))) == [(None, worse, "Promoted")]
