"""What the runs amount to: medians, ratios, goals, JSON and a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.trainer.contenders import CHECKPOINT, ISOLATED, LONGEST, NAMES, OURS, PADDED, TRL, Figures
from bench.trainer.shapes import Shape, peak
from bench.trainer.work import MAX_LENGTH

SCHEMA = "finetune-bench-trainer/2"
GOAL_LONGEST, GOAL_TRL, GOAL_ISOLATED, GOAL_CHECKPOINT = 1.5, 2.0, 1.3, 0.05
# On one GPU, and where the weights are sharded over several.
GOAL_MFU, GOAL_MFU_SHARDED = 0.55, 0.5
GOAL_USEFUL = 0.97
# Losses are told with four digits. In bf16, each of a token's products is rounded to 8 bits; the mean of 2,048 tokens is closer.
_AGREE = {"FP32": 2e-4, "BF16": 2e-2}


@dataclass(frozen=True)
class Goal:
    """A goal, and the figure that was reached; `least`: the figure must be at least `limit`, else at most."""

    what: str
    figure: float | None
    limit: float
    least: bool

    @property
    def reached(self) -> bool | None:
        """Whether it is reached; None: there is no figure."""
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.least else self.figure <= self.limit

    def verdict(self) -> str:
        """Reached, or missed and by how much."""
        if self.figure is None:
            return "not measured"
        if self.reached:
            return "reached"
        if self.least or self.limit >= 1:
            return f"missed by {abs(1 - self.figure / self.limit):.0%}"
        return f"missed by {100 * (self.figure - self.limit):.1f} points"


@dataclass
class Result:
    """All runs of one model: each contender's figures by the number of the round, and the sentences of its failures."""

    shape: Shape
    processes: int
    gpu: str | None
    rows: dict[str, Any] = field(default_factory=dict)
    rounds: dict[str, dict[int, Figures]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def speed(self, name: str) -> float | None:
        """The median of a contender's useful tokens a second."""
        return _median([each.tokens_per_second for each in self.rounds.get(name, {}).values()])

    def times(self, name: str) -> float | None:
        """How many times a contender's speed ours has: the median of the ratios of each round."""
        return _median(
            [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in self._with_ours(name)]
        )

    def void(self, name: str) -> str | None:
        """Why a contender's row does not count: it does not compute what ours computes; None where it does."""
        ours = next(iter(self.rounds.get(OURS, {}).values()), None)
        for run in self.rounds.get(name, {}).values():
            if not run.gradient > 0:
                return f"void: its first gradients have the norm {run.gradient:g}"
            if ours and not abs(run.loss - ours.loss) <= _AGREE[self.shape.precision]:
                return f"void: loss {run.loss:.4f} on the probe, ours {ours.loss:.4f}"
        return None

    def memory(self, name: str) -> float | None:
        """The median of a contender's peak memory, in bytes: of the GPUs, else of the host."""
        return _median([each.device_bytes or each.host_bytes for each in self.rounds.get(name, {}).values()])

    def useful(self, name: str) -> float | None:
        """Share of a contender's slots that are no padding, the median."""
        return _median([each.useful for each in self.rounds.get(name, {}).values()])

    def checkpoint_cost(self) -> float | None:
        """What a checkpoint in flight adds to a step's time, as a share of it: the median of the rounds'.

        Beside the steps of the run without checkpoints in the same round.
        """
        return _median(
            [
                _added(saving.flying, plain.step_seconds)
                for plain, saving in self._with_ours(CHECKPOINT)
                if saving.flying
            ]
        )

    def checkpoint_cost_within(self) -> float | None:
        """The same beside the other steps of the same run, which the machine's moods touch less."""
        runs = self.rounds.get(CHECKPOINT, {}).values()
        return _median([_added(run.flying, run.resting) for run in runs if run.flying and run.resting])

    def _with_ours(self, name: str) -> list[tuple[Figures, Figures]]:
        """Our figures and a contender's of each round that both ended."""
        ours, theirs = self.rounds.get(OURS, {}), {} if self.void(name) else self.rounds.get(name, {})
        return [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]

    def mfu(self, name: str) -> float | None:
        """Share of the GPUs' peak that a contender's useful tokens make, by 6N + 12 L H S with S = maxLength."""
        return self._utilization(name, self.shape.operations(MAX_LENGTH))

    def mfu_needed(self, name: str) -> float | None:
        """The same by what is needed: S the mean length of a row, and no gradients of frozen weights."""
        return self._utilization(name, self.shape.operations_needed(float(self.rows["mean"])))

    def _utilization(self, name: str, operations: float) -> float | None:
        speed, most = self.speed(name), peak(self.gpu)
        return None if speed is None or most is None else speed * operations / (most * self.processes)

    def _memory_to(self, name: str) -> float | None:
        ours, theirs = self.memory(OURS), None if self.void(name) else self.memory(name)
        return ours / theirs if ours and theirs else None

    def goals(self) -> list[Goal]:
        """The goals of this benchmark; that of the GPU only where its peak is known."""
        goals = [
            Goal(
                "ours / padded to the longest, useful tokens/s", self.times(LONGEST), GOAL_LONGEST, least=True
            ),
            Goal("ours / TRL packed, useful tokens/s", self.times(TRL), GOAL_TRL, least=True),
            Goal(
                "ours / TRL with our attention, useful tokens/s",
                self.times(ISOLATED),
                GOAL_ISOLATED,
                least=True,
            ),
            Goal("peak memory, ours / TRL packed", self._memory_to(TRL), 1.0, least=False),
            Goal("useful slots of ours", self.useful(OURS), GOAL_USEFUL, least=True),
            Goal(
                "step time added by a checkpoint in flight",
                self.checkpoint_cost(),
                GOAL_CHECKPOINT,
                least=False,
            ),
        ]
        if peak(self.gpu) is not None:
            limit = GOAL_MFU if self.processes == 1 else GOAL_MFU_SHARDED
            goals.append(Goal("MFU of ours", self.mfu(OURS), limit, least=True))
        return goals


def as_json(machine: Mapping[str, Any], date: str, results: Sequence[Result]) -> dict[str, Any]:
    """The whole run, as it is kept."""
    return {
        "schema": SCHEMA,
        "date": date,
        "machine": dict(machine),
        "models": [_model(result) for result in results],
    }


def _model(result: Result) -> dict[str, Any]:
    return {
        "name": result.shape.name,
        "method": result.shape.method,
        "precision": result.shape.precision,
        "parameters": result.shape.parameters,
        "processes": result.processes,
        "sequencesPerRank": result.shape.sequences,
        "rows": result.rows,
        "contenders": {name: _contender(result, name) for name in NAMES if name in _known(result)},
        "ratios": {
            "oursToPadded": result.times(PADDED),
            "oursToPaddedToLongest": result.times(LONGEST),
            "oursToTrl": result.times(TRL),
            "oursToTrlIsolated": result.times(ISOLATED),
            "checkpointInFlight": result.checkpoint_cost(),
            "checkpointInFlightSameRun": result.checkpoint_cost_within(),
        },
        "goals": [
            {"what": goal.what, "figure": goal.figure, "limit": goal.limit, "reached": goal.reached}
            for goal in result.goals()
        ],
    }


def _contender(result: Result, name: str) -> dict[str, Any]:
    rounds = result.rounds.get(name, {})
    return {
        "tokensPerSecond": result.speed(name),
        "mfu": result.mfu(name),
        "mfuNeeded": result.mfu_needed(name),
        "useful": result.useful(name),
        "void": result.void(name),
        "failures": result.failures.get(name, []),
        "rounds": [
            {
                "round": number,
                "description": each.description,
                "loss": each.loss,
                "gradient": each.gradient,
                "tokensPerSecond": round(each.tokens_per_second, 2),
                "tokensPerStep": round(each.tokens_per_step, 1),
                "stepSeconds": [round(second, 5) for second in each.step_seconds],
                "checkpointInFlight": each.in_flight,
                "hostBytes": each.host_bytes,
                "deviceBytes": each.device_bytes,
            }
            for number, each in rounds.items()
        ],
    }


def as_markdown(machine: Mapping[str, Any], date: str, results: Sequence[Result]) -> str:
    """The tables for people."""
    return "\n".join(_lines(machine, date, results))


def _lines(machine: Mapping[str, Any], date: str, results: Sequence[Result]) -> Iterator[str]:
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    gpu = f"{machine['gpus']} x {machine['gpu']}, " if machine["gpu"] else ""
    yield f"{date}; {gpu}{machine['cpu']}, {machine['cores']} cores; {versions}"
    for result in results:
        shape, rows = result.shape, result.rows
        at = rows["percentiles"]
        yield ""
        yield (
            f"**{shape.name}**, {shape.parameters / 1e6:,.1f} M parameters, SFT {shape.method}, {shape.precision}, "
            f"{result.processes} x {shape.sequences} sequences of {MAX_LENGTH:,} a step; {rows['rows']:,} rows of "
            f"{at['0']} to {at['100']} tokens (10%: {at['10']}, median {at['50']}, 90%: {at['90']})"
        )
        yield ""
        yield "| | how | useful tokens/s | least to most | ours / it | tokens a step | useful slots | step, s | memory, GiB | MFU |"
        yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        for name in NAMES:
            if name in _known(result):
                yield _row(result, name)
        yield ""
        yield "| goal | limit | measured | |"
        yield "|---|---:|---:|---|"
        for goal in result.goals():
            yield f"| {goal.what} | {_goal_limit(goal)} | {_goal_figure(goal)} | {goal.verdict()} |"


def _row(result: Result, name: str) -> str:
    rounds, failures = list(result.rounds.get(name, {}).values()), result.failures.get(name, [])
    if not rounds:
        reason = failures[0].strip().splitlines()[0].rstrip(":")
        return f"| {name} | {reason} | - | - | - | - | - | - | - | - |"
    speeds = [each.tokens_per_second for each in rounds]
    memory, useful, times = result.memory(name) or 0.0, result.useful(name) or 0.0, result.times(name)
    step = statistics.median(statistics.median(each.step_seconds) for each in rounds)
    tokens = statistics.median(each.tokens_per_step for each in rounds)
    mfu, needed = result.mfu(name), result.mfu_needed(name)
    mfu_text = "-" if mfu is None or needed is None else f"{mfu:.1%} (needed: {needed:.1%})"
    void = result.void(name)
    failed = f"; {void}" if void else ""
    failed += f"; failed rounds: {len(failures)}" if failures else ""
    return (
        f"| {name} | {rounds[0].description}{failed} | {statistics.median(speeds):,.0f} "
        f"| {min(speeds):,.0f} to {max(speeds):,.0f} | {'-' if times is None else f'{times:.2f}x'} | {tokens:,.0f} "
        f"| {useful:.0%} | {step:.3f} | {memory / 2**30:.2f} | {mfu_text} |"
    )


def _goal_limit(goal: Goal) -> str:
    limit = f"{goal.limit:.0%}" if goal.limit < 1 else f"{goal.limit:g}x"
    return f"{'at least' if goal.least else 'at most'} {limit}"


def _goal_figure(goal: Goal) -> str:
    if goal.figure is None:
        return "-"
    return f"{goal.figure:.1%}" if goal.limit < 1 else f"{goal.figure:.2f}x"


def _known(result: Result) -> set[str]:
    return set(result.rounds) | set(result.failures)


def _added(seconds: Sequence[float], baseline_seconds: Sequence[float]) -> float:
    return statistics.median(seconds) / statistics.median(baseline_seconds) - 1


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
