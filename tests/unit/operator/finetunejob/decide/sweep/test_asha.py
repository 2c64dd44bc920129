"""ASHA: which trials wait at a rung, which go on, and what the job does with both."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.sweep import SweepStatus, Trial
from finetune_operator.finetunejob.decide import accept
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import NO_MLFLOW, SETTINGS, applied, conclude, said
from unit.operator.finetunejob.decide.sweep.children import sweep_job

Json = dict[str, Any]
RUNGS = [10, 30, 90]
END = 270
SEEDS: Json = {"field": "training.seed", "range": {"min": 1, "max": 1000}}
ASHA: Json = {"parameters": [SEEDS], "algorithm": "ASHA", "rungs": RUNGS}
# A trial that starts, or a trial that goes on, and the rung that it trains to; len(RUNGS) is the end.
Assignment = tuple[int, int]


@dataclass
class Reference:
    """Algorithm 2 of arXiv:1810.05934 as it is written there, with reduction factor 3 and a limit of configurations."""

    limit: int
    started: int = 0
    results: list[dict[int, float]] = field(default_factory=lambda: [{} for _ in RUNGS])
    promoted: list[set[int]] = field(default_factory=lambda: [set() for _ in RUNGS])

    def get_job(self) -> Assignment | None:
        for k in reversed(range(len(RUNGS))):
            ranked = sorted(self.results[k], key=lambda n: (self.results[k][n], n))
            candidates = ranked[: len(ranked) // 3]
            promotable = [n for n in candidates if n not in self.promoted[k]]
            if promotable:
                self.promoted[k].add(promotable[0])
                return promotable[0], k + 1
        if self.started < self.limit:
            self.started += 1
            return self.started, 0
        return None


@dataclass
class Curves:
    """Recorded losses of trials at each step where they are evaluated, and the seconds of a step."""

    losses: dict[int, dict[int, float]]
    step_seconds: dict[int, float]

    @classmethod
    def record(cls, seed: int, trials: int, stragglers: float) -> Curves:
        draw = random.Random(seed)  # noqa: S311 - no secret
        losses = {
            n: {step: draw.random() + 1 / (1 + i) for i, step in enumerate([*RUNGS, END])}
            for n in range(1, trials + 1)
        }
        speeds = {n: 20.0 if draw.random() < stragglers else draw.uniform(0.9, 1.1) for n in losses}
        return cls(losses, speeds)

    def seconds(self, number: int, rung: int) -> float:
        """How long a trial takes from the rung before to this one."""
        steps = [0, *RUNGS, END]
        return (steps[rung + 1] - steps[rung]) * self.step_seconds[number]


def assign_by_reference(curves: Curves, parallel: int) -> Iterator[Assignment]:
    """What the reference starts and promotes, in this order."""
    reference, running, now = Reference(len(curves.losses)), list[tuple[float, int, int]](), 0.0
    while True:
        while len(running) < parallel and (job := reference.get_job()):
            yield job
            heapq.heappush(running, (now + curves.seconds(*job), *job))
        if not running:
            return
        now, number, rung = heapq.heappop(running)
        if rung < len(RUNGS):
            reference.results[rung][number] = curves.losses[number][RUNGS[rung]]


@dataclass
class Played:
    """A sweep whose trials the test plays: the decisions are the operator's."""

    curves: Curves
    job: FineTuneJob
    children: dict[str, Json] = field(default_factory=dict)
    losses: dict[int, dict[int, float]] = field(default_factory=dict)

    def decide(self) -> list[Assignment]:
        """Run passes until nothing changes; return which trials started or went on."""
        before = self._rungs()
        for _ in range(100):
            decision = self.decide_once()
            has_writes = decision.apply or decision.changed or decision.delete
            if decision.status == self.job.status and not has_writes:
                after = self._rungs()
                return [(n, rung) for n, rung in after.items() if before.get(n) != rung]
            self.job = replace(self.job, status=decision.status)
            self._carry_out(decision)
        raise AssertionError("the passes do not settle")

    def decide_once(self) -> Decision:
        return conclude(self.job, Observed(children=self.children, evaluations=self.losses))

    def reach(self, number: int, rung: int) -> None:
        """Let a trial reach a rung or its end."""
        status = self.children[f"tune-{number}"]["status"]
        if rung == len(RUNGS):
            self.end(number, END, self.curves.losses[number][END])
        else:
            status["progress"] = {"step": RUNGS[rung]}
            self.losses.setdefault(number, {})[RUNGS[rung]] = self.curves.losses[number][RUNGS[rung]]

    def end(self, number: int, step: int, loss: float) -> None:
        """Let a trial succeed after some steps."""
        status = self.children[f"tune-{number}"]["status"]
        status |= {"phase": "Succeeded", "progress": {"step": step}, "model": {"evalLoss": loss}}

    def trials(self) -> dict[int, Trial]:
        return {trial.n: trial for trial in (self.job.status.sweep or SweepStatus()).trials}

    def _rungs(self) -> dict[int, int]:
        """By number: the rung that a trial trains to."""
        return {n: trial.promotions or 0 for n, trial in self.trials().items()}

    def _carry_out(self, decision: Decision) -> None:
        for body in decision.apply:
            name = body["metadata"]["name"]
            body["metadata"]["uid"] = f"uid-of-{name}"
            self.children[name] = {**body, "status": {"phase": "Training", "mlflow": {"runId": name}}}
        for change in decision.changed:
            child = self.children[change.name]
            child["spec"] |= change.fields
            child["status"]["phase"] = "Suspended" if child["spec"].get("suspend") else "Training"
        for deletion in decision.delete:
            del self.children[deletion.name]


def play(curves: Curves, parallel: int, **fields: Any) -> Played:
    """A sweep over these curves that has not started."""
    sweep = ASHA | {"trials": len(curves.losses), "parallel": parallel, **fields}
    return Played(curves, sweep_job(sweep=sweep, training={"evalEverySteps": 10, "maxSteps": END}))


def assign_by_operator(played: Played) -> Iterator[Assignment]:
    """What the operator starts and promotes, in this order."""
    running, now = list[tuple[float, int, int]](), 0.0
    while True:
        for job in played.decide():
            yield job
            heapq.heappush(running, (now + played.curves.seconds(*job), *job))
        if not running:
            return
        now, number, rung = heapq.heappop(running)
        played.reach(number, rung)


# The seed of the curves, the number of trials, the share of trials that are 20 times as slow, and how many run at a time.
RECORDED: dict[str, tuple[int, int, float, int]] = {
    "one at a time": (1, 27, 0.0, 1),
    "stragglers": (3, 30, 0.3, 4),
    "all at once": (4, 27, 0.2, 27),
}


@pytest.mark.parametrize(("seed", "trials", "stragglers", "parallel"), RECORDED.values(), ids=RECORDED)
def test_the_choice_is_that_of_the_reference(
    seed: int, trials: int, stragglers: float, parallel: int
) -> None:
    curves = Curves.record(seed, trials, stragglers)
    chosen, expected = (
        list(assign_by_operator(play(curves, parallel))),
        [*assign_by_reference(curves, parallel)],
    )
    assert chosen == expected
    assert any(rung == len(RUNGS) for _number, rung in chosen)


THREE = {1: [0.9, 0.9, 0.9, 0.9], 2: [0.5, 0.6, 0.7, 0.8], 3: [0.7, 0.1, 0.1, 0.1]}


def start(losses: dict[int, list[float]], **fields: Any) -> Played:
    """A sweep of trials with these losses at the rungs and at the end; all of them have started."""
    curves = Curves(
        {n: dict(zip([*RUNGS, END], row, strict=True)) for n, row in losses.items()},
        dict.fromkeys(losses, 1.0),
    )
    played = play(curves, parallel=len(losses), **fields)
    assert played.decide() == [(n, 0) for n in losses]
    return played


def test_a_trial_that_waits_is_suspended_and_leaves_its_place() -> None:
    played = play(Curves.record(0, 3, 0.0), parallel=1)
    assert played.decide() == [(1, 0)]
    played.reach(1, 0)
    assert played.decide() == [(2, 0)]
    assert played.children["tune-1"]["spec"]["suspend"] is True
    assert played.trials()[1].to_json() | {"parameters": {}} == {
        "n": 1,
        "parameters": {},
        "phase": "Suspended",
        "rungs": [{"step": 10, "metric": played.curves.losses[1][10]}],
        "promotions": 0,
    }
    assert said(played.decide_once(), ConditionType.TRAINED) == (
        "False",
        "Training",
        "0 of 3 trials have ended, 1 waits at a rung; tune-2 runs",
    )


def test_the_best_third_is_promoted() -> None:
    played = start(THREE)
    for number in (1, 3):
        played.reach(number, 0)
        assert played.decide() == []
    played.reach(2, 0)
    assert played.decide() == [(2, 1)]
    suspended = {name: child["spec"].get("suspend", False) for name, child in played.children.items()}
    assert suspended == {"tune-1": True, "tune-2": False, "tune-3": True}


def test_with_few_trials_one_passes_all_rungs_and_the_others_are_deleted() -> None:
    played = start(THREE)
    for number, rung in [(1, 0), (3, 0), (2, 0), (2, 1), (2, 2), (2, 3)]:
        played.reach(number, rung)
        played.decide()
    assert [*played.children] == ["tune-2"]
    decision = played.decide_once()
    assert said(decision, ConditionType.SUCCEEDED) is not None
    trained = said(decision, ConditionType.TRAINED)
    assert trained
    assert trained[2].startswith("3 trials have ended, 2 of them at a rung; tune-2 is the best")
    assert [(n, trial.phase) for n, trial in played.trials().items()] == [
        (1, "Suspended"),
        (2, "Succeeded"),
        (3, "Suspended"),
    ]


def test_the_highest_accuracy_is_promoted() -> None:
    played = start(THREE, metric="eval_reward_accuracy")
    for number in (1, 2, 3):
        played.reach(number, 0)
    assert played.decide() == [(1, 1)]


def test_a_failed_trial_is_not_promoted() -> None:
    played = start(THREE)
    for number in (2, 1):
        played.reach(number, 0)
        played.decide()
    played.children["tune-2"]["status"]["phase"] = "Failed"
    played.reach(3, 0)
    # tune-2 stays the best of the three at the rung; when nothing else runs, the best one that can is promoted.
    assert played.decide() == [(3, 1)]


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    played = start(THREE | {1: [float("nan"), 1.0, 1.0, 1.0]})
    for number in (1, 2, 3):
        played.reach(number, 0)
    assert played.decide() == [(2, 1)]
    assert [rung.metric for rung in played.trials()[1].rungs or ()] == [None]


def test_a_trial_whose_loss_is_no_number_is_never_promoted() -> None:
    nothing = float("nan")
    played = start(
        {n: [nothing] * 4 for n in range(1, 8)} | {8: [0.5, nothing, 0.5, 0.5], 9: [0.7, 0.7, 0.7, 0.7]}
    )
    for number in range(1, 10):
        played.reach(number, 0)
    assert played.decide() == [(8, 1), (9, 1)]
    for number in (8, 9):
        played.reach(number, 1)
    # tune-8 is at the same rung, with nothing to compare.
    assert played.decide() == [(9, 2)]


def test_a_trial_that_stopped_early_does_not_end_the_sweep() -> None:
    played = start(THREE)
    played.end(1, 5, 9.0)
    for number, rung in [(2, 0), (3, 0)]:
        played.reach(number, rung)
    assert played.decide() == [(2, 1)]
    for rung in (1, 2, 3):
        played.reach(2, rung)
        played.decide()
    sweep = played.job.status.sweep
    assert sweep is not None
    assert (sweep.best, played.job.status.phase) == (2, "Succeeded")


def test_the_sweep_ends_only_when_the_last_trial_is_suspended() -> None:
    played = start(THREE | {4: [1.0, 1.0, 1.0, 1.0]}, rungs=[10])
    for number in (1, 2, 3):
        played.reach(number, 0)
    assert played.decide() == [(2, 1)]
    played.end(2, END, 0.4)
    assert played.decide() == []
    played.reach(4, 0)
    decision = played.decide_once()
    assert said(decision, ConditionType.SUCCEEDED) is None
    assert [(change.name, change.fields) for change in decision.changed] == [("tune-4", {"suspend": True})]


# What the sweep has besides rungs, the settings, and why the job waits.
OBSTACLES: dict[str, tuple[Json, Settings, list[ConditionReason]]] = {
    "no checkpoints": ({"checkpoint": None}, SETTINGS, [ConditionReason.STORAGE_NOT_CONFIGURED]),
    "no MLflow server": ({}, NO_MLFLOW, [ConditionReason.MLFLOW_NOT_CONFIGURED]),
    "nothing": ({}, SETTINGS, []),
}


@pytest.mark.parametrize(("parts", "settings", "reasons"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_asha_requires(parts: Json, settings: Settings, reasons: list[ConditionReason]) -> None:
    spec = sweep_job(sweep=ASHA | {"trials": 3}, training={"evalEverySteps": 10}, **parts).spec
    assert spec
    assert [reason for reason, _message in accept.obstacles(spec, settings, "team")] == reasons


def test_what_was_not_read_yet_is_awaited() -> None:
    played = start(THREE, metric="eval_reward_accuracy")
    for number in (1, 2, 3):
        played.reach(number, 0)
    played.decide()
    for rung in (1, 2):
        played.reach(1, rung)
        played.decide()
    played.end(1, END, 0.0)
    losses, played.losses = played.losses, {}
    trained = said(played.decide_once(), ConditionType.TRAINED)
    assert trained
    assert trained[2].endswith("; tune-1 runs; waiting for the evaluations of tune-1 in MLflow")
    played.losses = {1: losses[1] | {END: 0.9}}
    played.decide()
    assert played.trials()[1].metric == 0.9


def test_a_run_that_lost_its_evaluations_does_not_stop_the_sweep() -> None:
    played = start({1: [0.9, 0.9, 0.9, 0.9]})
    played.end(1, END, 0.4)
    assert said(played.decide_once(), ConditionType.SUCCEEDED) is None
    played.losses = {1: {}}
    played.decide()
    assert played.job.status.phase == "Succeeded"


def test_the_usage_of_deleted_trials_counts() -> None:
    played = start(THREE)
    for child in played.children.values():
        child["status"]["usage"] = {"podHours": 4.0, "gpuHours": 8.0, "jobs": []}
    for number, rung in [(1, 0), (3, 0), (2, 0), (2, 1), (2, 2), (2, 3)]:
        played.reach(number, rung)
        played.decide()
    assert [*played.children] == ["tune-2"]
    assert played.job.status.usage is not None
    assert played.job.status.usage.pod_hours == 12.0


def test_a_trial_that_ran_past_its_next_rung_waits_there_at_once() -> None:
    played = start(THREE)
    for number, rung in [(2, 0), (2, 1), (1, 0), (3, 0)]:
        played.reach(number, rung)
    assert played.decide() == [(2, 2)]
    assert [rung.step for rung in played.trials()[2].rungs or ()] == [10, 30]


def test_a_deleted_trial_that_waits_starts_again_only_when_promoted() -> None:
    played = start(THREE)
    for number in (2, 1):
        played.reach(number, 0)
        played.decide()
    del played.children["tune-1"], played.children["tune-2"]
    assert applied(played.decide_once()) == []
    played.reach(3, 0)
    assert played.decide() == [(2, 1)]
    assert sorted(played.children) == ["tune-2", "tune-3"]


def test_a_loss_that_is_not_there_yet_is_read_again() -> None:
    played = start(THREE)
    played.reach(1, 0)
    played.losses.clear()
    assert played.decide_once().requeue_seconds == SETTINGS.poll_seconds
