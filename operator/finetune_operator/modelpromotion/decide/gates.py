"""Gates: judge whether a version may get the alias or, in a canary, more traffic. Each verdict has the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.evaluation import BASE_PREFIX
from finetune_crds.gates import ComparisonGate, Gate, MetricGate, TagGate, Tolerance
from finetune_crds.promotion_status import GatesStatus, GateVerdict, Verdict
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.bounds import describe_bounds, format_number, is_within
from finetune_operator.modelpromotion.decide.digests import gates_digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.gate_jobs import (
    find_measurement,
    has_job_in_progress,
    start_missing,
)
from finetune_operator.modelpromotion.decide.measurement import Measurement, judge_job, read_measured
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import ModelVersion, find_comparison_tag


def check_gates(draft: Draft) -> Outcome:
    """Judge the candidate; the pass ends unless every gate passes."""
    candidate = draft.observed.versions.get(draft.status.candidate or "")
    if candidate is None:
        # The candidate was not read in this pass. If it does not exist, an earlier policy has reported that.
        return Stop
    holder = draft.observed.versions.get(draft.holder or "")
    verdicts = judge(
        draft.spec.gates, candidate, holder, lost=draft.lost, measure=partial(find_measurement, draft)
    )
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
    """Report the verdicts, and continue only if every gate passed."""
    version = draft.status.candidate
    failed = [item for item in verdicts if item.verdict == "Failed"]
    unclear = [item for item in verdicts if item.verdict == "Inconclusive"]
    # A Job can take hours: none is started for a version that another gate has refused.
    is_starting = not failed and start_missing(draft)
    if failed:
        message = f"version {version} is refused: {_join_verdicts(failed)}"
        draft.set(ConditionType.GATES_PASSED, False, ConditionReason.GATE_FAILED, message)
        draft.stop(ConditionReason.GATE_FAILED, message)
    elif unclear:
        _report_unclear(draft, unclear, is_starting=is_starting)
    elif verdicts:
        passed = "its gate" if len(verdicts) == 1 else f"all {len(verdicts)} gates"
        message = f"version {version} passed {passed}: {_join_verdicts(verdicts)}"
        draft.set(ConditionType.GATES_PASSED, True, ConditionReason.GATES_PASSED, message)
    else:
        draft.set(
            ConditionType.GATES_PASSED, True, ConditionReason.NO_GATES, f"version {version}: no gates are set"
        )
    if failed or unclear:
        # A version must pass throughout its soak, so approval and soak start again.
        forget_waits(draft)
        return Stop
    return Continue


def _report_unclear(draft: Draft, unclear: Sequence[GateVerdict], *, is_starting: bool) -> None:
    """Report that gates cannot be judged yet. The reason why a Job could not be created stays until it is created.

    NB: otherwise, each pass would first report that the Job is created, and then the same failure again, and so write the status twice.
    """
    condition = draft.condition(ConditionType.GATES_PASSED)
    if is_starting and condition and condition.reason == ConditionReason.GATE_NOT_STARTED:
        return
    reason = ConditionReason.GATE_RUNNING if has_job_in_progress(draft) else ConditionReason.GATE_INCONCLUSIVE
    message = f"version {draft.status.candidate} cannot be judged yet: {_join_verdicts(unclear)}"
    draft.set(ConditionType.GATES_PASSED, None, reason, message)
    draft.stop(reason, message)


def _join_verdicts(verdicts: Sequence[GateVerdict]) -> str:
    return "; ".join(f"{item.name}: {item.message}" for item in verdicts)


Measure = Callable[[str, ModelVersion], Measurement]
"""Returns what the Job of the gate with this name says about a version."""


def _refuse_to_measure(gate_name: str, version: ModelVersion) -> Measurement:
    """The default of `measure`.

    Raises:
        ValueError: always; gates without Jobs need no measurements.
    """
    raise ValueError(f"gate {gate_name} cannot measure version {version.version}")


@dataclass(frozen=True)
class _Baseline:
    """The version to compare with; see the arguments of `judge`."""

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
    measure: Measure = _refuse_to_measure,
) -> list[GateVerdict]:
    """The verdict of each gate on a version.

    Args:
        holder: the version to compare the candidate with, usually the one that has the alias; None if there is none.
        lost: the version that had the alias until it was deleted, if this is why there is no holder.
        which: a clause that describes the holder in messages.
        measure: returns what Jobs say about a version; only gates with Jobs need it.
    """
    baseline = _Baseline(holder, lost, which)
    return [_judge_gate(gate, candidate, baseline, measure) for gate in gates]


def _judge_gate(gate: Gate, candidate: ModelVersion, baseline: _Baseline, measure: Measure) -> GateVerdict:
    if gate.job:
        return judge_job(gate.name, measure(gate.name, candidate))
    if gate.job_name:
        measured = _measure(gate, gate.job_name, candidate, baseline, measure)
        if isinstance(measured, str):
            return GateVerdict(name=gate.name, verdict="Inconclusive", message=measured)
        candidate, baseline = measured
    if gate.metric:
        return _judge_metric(gate.name, gate.metric, candidate)
    if gate.tag:
        return _judge_tag(gate.name, gate.tag, candidate)
    if gate.comparison:
        return _judge_comparison(gate.name, gate.comparison, candidate, baseline)
    raise ValueError(f"gate {gate.name} has an unknown kind")


def _measure(
    gate: Gate, job_gate: str, candidate: ModelVersion, baseline: _Baseline, measure: Measure
) -> tuple[ModelVersion, _Baseline] | str:
    """The candidate and the baseline with the numbers of a Job, or why the Job has not reported a number."""
    number = gate.metric.name if gate.metric else gate.comparison.metric if gate.comparison else ""
    measured = read_measured(candidate, measure(job_gate, candidate), number)
    if isinstance(measured, str) or gate.comparison is None or baseline.version is None:
        return measured if isinstance(measured, str) else (measured, baseline)
    base = read_measured(baseline.version, measure(job_gate, baseline.version), number)
    return base if isinstance(base, str) else (measured, replace(baseline, version=base))


def _judge_metric(name: str, gate: MetricGate, candidate: ModelVersion) -> GateVerdict:
    low, high = gate.min, gate.max
    limit = describe_bounds(low, high)
    value = _read_number(candidate, gate.name)
    if isinstance(value, str):
        return GateVerdict(name=name, verdict="Inconclusive", limit=limit, message=value)
    met = math.isfinite(value) and is_within(value, low, high)
    verdict: Verdict = "Passed" if met else "Failed"
    message = f"{gate.name} is {format_number(value)}, which {'meets' if met else 'does not meet'} {limit}"
    return GateVerdict(name=name, verdict=verdict, value=format_number(value), limit=limit, message=message)


def _judge_tag(name: str, gate: TagGate, candidate: ModelVersion) -> GateVerdict:
    expected = _shorten(gate.equals)
    limit = f"= {expected}"
    value = candidate.tags.get(gate.name)
    if value is None:
        message = f"version {candidate.version} has no tag {gate.name}, which must be {expected!r}"
        return GateVerdict(name=name, verdict="Inconclusive", limit=limit, message=message)
    if value == gate.equals:
        message = f"tag {gate.name} is {_shorten(value)!r}"
        return GateVerdict(name=name, verdict="Passed", value=_shorten(value), limit=limit, message=message)
    message = f"tag {gate.name} is {_shorten(value)!r}, but must be {expected!r}"
    return GateVerdict(name=name, verdict="Failed", value=_shorten(value), limit=limit, message=message)


def _judge_comparison(
    name: str, gate: ComparisonGate, candidate: ModelVersion, baseline: _Baseline
) -> GateVerdict:
    """The verdict on a candidate's number, compared with the number of the baseline."""
    value = _read_number(candidate, gate.metric)
    if isinstance(value, str):
        return GateVerdict(name=name, verdict="Inconclusive", message=value)
    if not math.isfinite(value):
        message = f"{gate.metric} of version {candidate.version} is {format_number(value)}, which cannot be compared"
        return GateVerdict(name=name, verdict="Failed", value=format_number(value), message=message)
    if baseline.version is None:
        return _judge_alone(name, gate, value, baseline)
    base_value = _find_base_value(gate, candidate, baseline.version)
    baseline_value = _read_number(baseline.version, gate.metric) if base_value is None else base_value
    if isinstance(baseline_value, str):
        return GateVerdict(
            name=name, verdict="Inconclusive", value=format_number(value), message=baseline_value
        )
    incomparable = (
        _explain_incomparable(gate, candidate, baseline.version, baseline_value, baseline.which)
        if base_value is None
        else None
    )
    if incomparable:
        return GateVerdict(
            name=name,
            verdict="Inconclusive",
            value=format_number(value),
            holder=format_number(baseline_value),
            message=incomparable,
        )
    low, high = _bounds(gate, baseline_value)
    limit = f"<= {format_number(high)}" if high is not None else f">= {format_number(low)}"
    met = is_within(value, low, high)
    verdict: Verdict = "Passed" if met else "Failed"
    message = (
        f"{gate.metric} is {format_number(value)}, which {'meets' if met else 'does not meet'} {limit}, since version {baseline.version.version}, "
        f"{baseline.which}, has {format_number(baseline_value)}{'' if base_value is None else ' on the same rows'}"
    )
    return GateVerdict(
        name=name,
        verdict=verdict,
        value=format_number(value),
        limit=limit,
        holder=format_number(baseline_value),
        message=message,
    )


def _find_base_value(gate: ComparisonGate, candidate: ModelVersion, holder: ModelVersion) -> float | None:
    """The holder's number as the base model of the candidate; None if the holder has its own number on the same data, or is not the base."""
    if candidate.tags.get(contract.TAG_BASE_VERSION) != holder.version:
        return None
    base_value = _read_number(candidate, f"{BASE_PREFIX}{gate.metric}")
    if isinstance(base_value, str) or not math.isfinite(base_value):
        return None
    holder_value = _read_number(holder, gate.metric)
    if isinstance(holder_value, str) or _explain_incomparable(gate, candidate, holder, holder_value, ""):
        return base_value
    return None


def _judge_alone(name: str, gate: ComparisonGate, value: float, baseline: _Baseline) -> GateVerdict:
    """The verdict without a baseline: the first version passes; a version whose predecessor was deleted is inconclusive."""
    if baseline.lost is None:
        message = f"{gate.metric} is {format_number(value)}, and no version has the alias to compare with"
        return GateVerdict(name=name, verdict="Passed", value=format_number(value), message=message)
    message = (
        f"{gate.metric} is {format_number(value)}, and version {baseline.lost}, which had the alias, was deleted: set "
        "spec.rollbackTo to the version that the alias should point at"
    )
    return GateVerdict(name=name, verdict="Inconclusive", value=format_number(value), message=message)


def _bounds(gate: ComparisonGate, baseline_value: float) -> tuple[float | None, float | None]:
    """The lowest and the highest value that pass, given the baseline's value; None for no limit."""
    # By how much the value must be better than the baseline's; negative if it may be worse.
    margin = (
        _margin(gate.better_by, baseline_value)
        if gate.better_by
        else -_margin(gate.not_worse_than, baseline_value)
    )
    return (None, baseline_value - margin) if gate.goal == "Minimize" else (baseline_value + margin, None)


def _explain_incomparable(
    gate: ComparisonGate, candidate: ModelVersion, holder: ModelVersion, baseline_value: float, which: str
) -> str | None:
    """Explain why two versions cannot be compared; None if they can."""
    if not math.isfinite(baseline_value):
        return f"{gate.metric} of version {holder.version}, {which}, is {format_number(baseline_value)}"
    # The name of the tag with the digest of the evaluation data, and the digest.
    candidate_tag, candidate_data = find_comparison_tag(candidate, gate.metric)
    holder_tag, holder_data = find_comparison_tag(holder, gate.metric)
    if candidate_data is None or holder_data is None:
        untagged = candidate if candidate_data is None else holder
        missing = f"version {untagged.version} does not record its evaluation data"
        remedy = f"set the tag {contract.TAG_EVAL_DATA} of the version"
        return (
            f"{missing}, and its run cannot be read ({untagged.unread}): {remedy}"
            if untagged.unread
            else f"{missing}: {remedy} or of its run"
        )
    if candidate_tag != holder_tag:
        is_candidate_evaluated = candidate_tag == contract.TAG_EVALUATION_DATA
        evaluated, trained = (candidate, holder) if is_candidate_evaluated else (holder, candidate)
        return (
            f"{gate.metric} of version {evaluated.version} comes from spec.evaluation, but {gate.metric} of version {trained.version} comes "
            "from training: evaluate both versions with spec.evaluation"
        )
    if candidate_data != holder_data:
        difference = "settings" if candidate_tag == contract.TAG_EVALUATION_DATA else "objectives"
        return (
            f"version {candidate.version} ({_shorten(candidate_data)}) and version {holder.version}, {which} "
            f"({_shorten(holder_data)}), were evaluated on different data or with different {difference}: evaluate both versions on the "
            f"same data with the same {difference}"
        )
    return None


def _margin(tolerance: Tolerance | None, baseline_value: float) -> float:
    if tolerance is None:
        return 0.0
    return (
        tolerance.absolute
        if tolerance.absolute is not None
        else (tolerance.relative or 0.0) * abs(baseline_value)
    )


def _read_number(version: ModelVersion, name: str) -> float | str:
    """Return a number of a version, or a message that explains why the version does not have the number.

    Tags take precedence over metrics: a tag describes exactly the weights of the version, while the last metric of the run can be from a
    later step.
    """
    text = version.tags.get(name)
    if text is None and name in version.metrics:
        return version.metrics[name]
    if text is None:
        if version.unread:
            return (
                f"version {version.version} has no tag {name}, and the metrics of its run cannot be read ({version.unread}): set the tag "
                f"{name} of the version"
            )
        return f"version {version.version} has no {name}: {name} is neither a tag of the version nor a metric of its run"
    try:
        return float(text)
    except ValueError:
        return f"tag {name} of version {version.version} is {_shorten(text)!r}, which is not a number"


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
