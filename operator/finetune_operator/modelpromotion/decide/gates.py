"""Gates: whether a version may get the alias, with the numbers behind each verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.gates import ComparisonGate, Gate, MetricGate, TagGate, Tolerance
from finetune_crds.promotion_status import GatesStatus, GateVerdict, Verdict
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.digests import gates_digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import ModelVersion, comparable_on

_ROUNDING = 1e-9


def check_gates(draft: Draft) -> Outcome:
    """Judge the candidate; the pass ends unless every gate passes."""
    candidate = draft.observed.versions.get(draft.status.candidate or "")
    if candidate is None:
        return Stop
    holder = draft.observed.versions.get(draft.holder or "")
    verdicts = judge(draft.spec.gates, candidate, holder, lost=draft.lost)
    passed = sum(item.verdict == "Passed" for item in verdicts)
    draft.update(
        gates=GatesStatus(
            version=candidate.version,
            holder=holder.version if holder else None,
            digest=gates_digest(draft.spec.gates),
            summary=f"{passed}/{len(verdicts)}",
            verdicts=verdicts,
        )
    )
    return _conclude(draft, verdicts)


def _conclude(draft: Draft, verdicts: Sequence[GateVerdict]) -> Outcome:
    version = draft.status.candidate
    failed = [item for item in verdicts if item.verdict == "Failed"]
    unclear = [item for item in verdicts if item.verdict == "Inconclusive"]
    if failed:
        message = f"version {version} is refused: {_all(failed)}"
        draft.set(ConditionType.GATES_PASSED, False, ConditionReason.GATE_FAILED, message)
        draft.stop(ConditionReason.GATE_FAILED, message)
    elif unclear:
        message = f"version {version} cannot be judged yet: {_all(unclear)}"
        draft.set(ConditionType.GATES_PASSED, None, ConditionReason.GATE_INCONCLUSIVE, message)
        draft.stop(ConditionReason.GATE_INCONCLUSIVE, message)
    elif verdicts:
        passed = "its gate" if len(verdicts) == 1 else f"all {len(verdicts)} gates"
        message = f"version {version} passed {passed}: {_all(verdicts)}"
        draft.set(ConditionType.GATES_PASSED, True, ConditionReason.GATES_PASSED, message)
    else:
        draft.set(
            ConditionType.GATES_PASSED, True, ConditionReason.NO_GATES, f"version {version}: no gates are set"
        )
    if failed or unclear:
        # A version must pass throughout its soak.
        forget_waits(draft)
        return Stop
    return Continue


def _all(verdicts: Sequence[GateVerdict]) -> str:
    return "; ".join(f"{item.name}: {item.message}" for item in verdicts)


@dataclass(frozen=True)
class _Baseline:
    """What a version is compared with; see the arguments of `judge`."""

    version: ModelVersion | None
    lost: str | None
    which: str


def judge(
    gates: Sequence[Gate],
    candidate: ModelVersion,
    holder: ModelVersion | None,
    *,
    lost: str | None = None,
    which: str = "which has the alias",
) -> list[GateVerdict]:
    """The verdict of each gate on a version.

    Args:
        holder: what it is compared with, such as the version that has the alias; None when there is none.
        lost: the version that had the alias until it was deleted, when there is no holder for that reason.
        which: what the holder is, for the messages.
    """
    baseline = _Baseline(holder, lost, which)
    return [_verdict(gate, candidate, baseline) for gate in gates]


def _verdict(gate: Gate, candidate: ModelVersion, baseline: _Baseline) -> GateVerdict:
    if gate.metric:
        return _metric(gate.name, gate.metric, candidate)
    if gate.tag:
        return _tag(gate.name, gate.tag, candidate)
    if gate.comparison:
        return _comparison(gate.name, gate.comparison, candidate, baseline)
    raise ValueError(f"the gate {gate.name} is of a kind that cannot be judged")


def _metric(name: str, gate: MetricGate, candidate: ModelVersion) -> GateVerdict:
    low, high = gate.min, gate.max
    parts = [f">= {show(low)}"] if low is not None else []
    parts += [f"<= {show(high)}"] if high is not None else []
    limit = " and ".join(parts)
    value = _number(candidate, gate.name)
    if isinstance(value, str):
        return GateVerdict(name=name, verdict="Inconclusive", limit=limit, message=value)
    within = (
        math.isfinite(value)
        and (low is None or _at_most(low, value))
        and (high is None or _at_most(value, high))
    )
    verdict: Verdict = "Passed" if within else "Failed"
    message = f"{gate.name} is {show(value)}, {'as' if within else 'but'} it must be {limit}"
    return GateVerdict(name=name, verdict=verdict, value=show(value), limit=limit, message=message)


def _tag(name: str, gate: TagGate, candidate: ModelVersion) -> GateVerdict:
    wanted = _cut(gate.equals)
    limit = f"= {wanted}"
    value = candidate.tags.get(gate.name)
    if value is None:
        message = f"version {candidate.version} has no tag {gate.name}, which must be {wanted!r}"
        return GateVerdict(name=name, verdict="Inconclusive", limit=limit, message=message)
    if value == gate.equals:
        message = f"tag {gate.name} is {_cut(value)!r}"
        return GateVerdict(name=name, verdict="Passed", value=_cut(value), limit=limit, message=message)
    message = f"tag {gate.name} is {_cut(value)!r}, but it must be {wanted!r}"
    return GateVerdict(name=name, verdict="Failed", value=_cut(value), limit=limit, message=message)


def _comparison(name: str, gate: ComparisonGate, candidate: ModelVersion, baseline: _Baseline) -> GateVerdict:
    value = _number(candidate, gate.metric)
    if isinstance(value, str):
        return GateVerdict(name=name, verdict="Inconclusive", message=value)
    if not math.isfinite(value):
        message = f"{gate.metric} of version {candidate.version} is {show(value)}, which cannot be compared"
        return GateVerdict(name=name, verdict="Failed", value=show(value), message=message)
    if baseline.version is None:
        return _alone(name, gate, value, baseline)
    other = _number(baseline.version, gate.metric)
    unclear = (
        other
        if isinstance(other, str)
        else _incomparable(gate, candidate, baseline.version, other, baseline.which)
    )
    if isinstance(other, str) or unclear:
        held = None if isinstance(other, str) else show(other)
        return GateVerdict(
            name=name, verdict="Inconclusive", value=show(value), holder=held, message=unclear or ""
        )
    low, high = _bounds(gate, other)
    limit = f"<= {show(high)}" if high is not None else f">= {show(low)}"
    met = (low is None or _at_most(low, value)) and (high is None or _at_most(value, high))
    verdict: Verdict = "Passed" if met else "Failed"
    message = (
        f"{gate.metric} is {show(value)}, that of version {baseline.version.version}, {baseline.which}, is {show(other)}: "
        f"{'as' if met else 'but'} it must be {limit}"
    )
    return GateVerdict(
        name=name, verdict=verdict, value=show(value), limit=limit, holder=show(other), message=message
    )


def _alone(name: str, gate: ComparisonGate, value: float, baseline: _Baseline) -> GateVerdict:
    """The verdict without a baseline: a first version passes, one whose predecessor was deleted does not."""
    if baseline.lost is None:
        message = f"{gate.metric} is {show(value)}, and the alias has no holder to compare with"
        return GateVerdict(name=name, verdict="Passed", value=show(value), message=message)
    message = (
        f"{gate.metric} is {show(value)}, and version {baseline.lost}, which had the alias, was deleted: set "
        "spec.rollbackTo to the version that is to have it now"
    )
    return GateVerdict(name=name, verdict="Inconclusive", value=show(value), message=message)


def _bounds(gate: ComparisonGate, other: float) -> tuple[float | None, float | None]:
    """The lowest and the highest value that pass, given the holder's."""
    margin = _margin(gate.better_by, other) if gate.better_by else -_margin(gate.not_worse_than, other)
    return (None, other - margin) if gate.goal == "Minimize" else (other + margin, None)


def _incomparable(
    gate: ComparisonGate, candidate: ModelVersion, holder: ModelVersion, other: float, which: str
) -> str | None:
    """Why two versions cannot be compared; None when they can."""
    if not math.isfinite(other):
        return f"{gate.metric} of version {holder.version}, {which}, is {show(other)}"
    tag, mine = comparable_on(candidate, gate.metric)
    other_tag, its = comparable_on(holder, gate.metric)
    if mine is None or its is None:
        silent = candidate if mine is None else holder
        needs = f"the version needs the tag {contract.TAG_EVAL_DATA}"
        why = f"{needs}, as {silent.unread}" if silent.unread else f"its run or {needs}"
        return f"version {silent.version} does not say what data it was evaluated on: {why}"
    if tag != other_tag:
        judged, plain = (candidate, holder) if tag == contract.TAG_EVALUATION_DATA else (holder, candidate)
        return (
            f"{gate.metric} of version {judged.version} is from spec.evaluation of its job, and that of version "
            f"{plain.version} is not: evaluate both alike"
        )
    if mine != its:
        otherwise = "in another way" if tag == contract.TAG_EVALUATION_DATA else "with another objective"
        return (
            f"version {candidate.version} was evaluated on other data, or {otherwise} "
            f"({_cut(mine)}), than version {holder.version}, {which} ({_cut(its)}): "
            "evaluate both alike"
        )
    return None


def _margin(tolerance: Tolerance | None, other: float) -> float:
    if tolerance is None:
        return 0.0
    return tolerance.absolute if tolerance.absolute is not None else (tolerance.relative or 0.0) * abs(other)


def _at_most(low: float, high: float) -> bool:
    # NB: in floating point 0.3 - 0.1 is less than 0.2; a tolerance of 0.1 must include 0.2.
    return low <= high or math.isclose(low, high, rel_tol=_ROUNDING)


def _number(version: ModelVersion, name: str) -> float | str:
    """A number of a version, or a message that says why there is none.

    NB: tags take precedence. They describe exactly these weights; a run's last metric may be from a later step.
    """
    text = version.tags.get(name)
    if text is None and name in version.metrics:
        return version.metrics[name]
    if text is None:
        why = f" ({version.unread}: set the tag {name} of the version)" if version.unread else ""
        return f"version {version.version} has no {name}: neither a tag of the version nor a metric of its run{why}"
    try:
        return float(text)
    except ValueError:
        return f"tag {name} of version {version.version} is {_cut(text)!r}, which is not a number"


def show(value: float | None) -> str:
    """A number as messages and the status show it."""
    return f"{value:.6g}" if value is not None else ""


def _cut(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
