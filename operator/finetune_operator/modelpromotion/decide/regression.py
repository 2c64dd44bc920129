"""spec.onRegression: watch a number after the alias has moved to a candidate, and move the alias back if the number gets out of bounds.

A number of Prometheus is about everything that the endpoint serves, so a breach counts only while the endpoint serves the watched version alone,
also where the number is the endpoint's own, of this version. If the number was out of bounds before the version had traffic, a breach counts only after the number has been good once.

The watch is in the journal, so a restart loses nothing. A number that cannot be read moves no alias: whether it is out of bounds is then
unknown, and the time of `forSeconds` starts again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import Move, MoveReason, Watch
from finetune_crds.regression import OnRegression
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.bounds import describe_bounds, format_number, is_within
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import routes_of
from finetune_operator.modelpromotion.model import Reading
from finetune_operator.modelpromotion.versions import is_older
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import format_time, shorten

_MAX_NAME_CHARS = 200
# A breach lasts at most this many poll intervals from one reading to the next, so that no jump of the clock decides.
_MAX_POLLS_PER_READING = 3


def begin_watch(draft: Draft, move: Move) -> None:
    """After a move of the alias: watch the version if it was the candidate. A move back, or one that a person chose, is not watched."""
    if move.reason == "Repaired":
        # The alias is where it was before the drift.
        return
    draft.remember(watch=None)
    if move.reason != "Regressed":
        draft.unset(ConditionType.REGRESSED)
    version = move.to_version
    if draft.spec.on_regression is None or version is None:
        return
    is_forward = move.reason == "Reverted" and not is_older(version, move.from_version)
    if move.reason == "Promoted" or is_forward:
        draft.remember(watch=Watch(version=version))


def forget_watch(draft: Draft) -> None:
    """End the watch without a result."""
    if draft.status.watch is not None:
        draft.remember(watch=None)
        draft.unset(ConditionType.REGRESSED)


def watch_version(draft: Draft) -> Outcome:
    """Judge the number of the version that is watched, and withhold the version if it regressed. Always continues the pass."""
    spec, watch = draft.spec.on_regression, draft.status.watch
    if spec is None:
        draft.remember(watch=None)
        draft.unset(ConditionType.REGRESSED)
    elif watch is not None and watch.version != draft.status.promoted:
        forget_watch(draft)
    elif watch is not None:
        _judge(draft, spec, watch)
    return Continue


def await_recovery(draft: Draft, reason: MoveReason = "Promoted") -> Outcome:
    """Each pass ends here while the version with the alias is out of bounds, unless the move to the candidate for the reason has begun.

    NB: otherwise, the alias could later move back to that version, which would not be watched then. During the canary of the candidate, no
    breach counts, so this ends no canary.
    """
    spec, watch, version = draft.spec.on_regression, draft.status.watch, draft.status.candidate or ""
    if spec is None or watch is None or watch.breach_time is None or draft.has_begun(version, reason):
        return Continue
    message = (
        f"version {version} meets every requirement; alias {draft.spec.alias} moves to it once {_name(spec)} of version {watch.version} is "
        f"{describe_bounds(spec.min, spec.max)} again, or the alias has moved back"
    )
    draft.stop(ConditionReason.BREACHED, message)
    return Stop


def interrupt_breach(draft: Draft) -> None:
    """In a pass that did not judge the number, because an earlier policy ended the pass: a breach does not go on, as far as is known."""
    watch = draft.status.watch
    if watch is not None and watch.breach_time is not None and not draft.is_number_judged:
        draft.remember(watch=_without_breach(watch))
        draft.unset(ConditionType.REGRESSED)


def _judge(draft: Draft, spec: OnRegression, watch: Watch) -> None:
    draft.is_number_judged = True
    draft.requeue_after(draft.settings.poll_seconds)
    reading, traffic = _find_reading(draft, spec, watch), _find_traffic(draft, watch)
    value = reading.value if reading else None
    is_good = value is not None and is_within(value, spec.min, spec.max)
    if is_good or (value is not None and traffic == "None"):
        watch = watch.model_copy(update={"inherited": None if is_good else True})
    watch = _update_start(draft, watch, traffic)
    if reading is None:
        _report_watching(draft, spec, watch)
    elif value is None:
        _handle_unreadable(draft, spec, watch, reading)
    elif is_good:
        _handle_good(draft, spec, watch)
    elif watch.start_time is None:
        _report_watching(draft, spec, _without_breach(watch))
    elif watch.inherited:
        _handle_inherited(draft, spec, watch)
    else:
        _handle_breach(draft, spec, watch, value)


def _find_reading(draft: Draft, spec: OnRegression, watch: Watch) -> Reading | None:
    """The number of the version, or why it is unknown; None if this pass has not read it."""
    metric, endpoint = spec.endpoint_metric, draft.observed.endpoint
    if metric is None:
        return draft.observed.reading
    if endpoint is None or endpoint.problem:
        return Reading(problem=endpoint.problem) if endpoint else None
    value = endpoint.traffic.get(watch.version, {}).get(metric)
    if value is None:
        name = draft.spec.serving.endpoint if draft.spec.serving else ""
        message = f"endpoint {name} had no {metric} of version {watch.version} in the last minute"
        return Reading(problem=Problem(ConditionReason.METRIC_INCONCLUSIVE, message))
    return Reading(value)


def _find_traffic(draft: Draft, watch: Watch) -> Literal["None", "Part", "All"]:
    """The share of the watched version in the traffic that the number is about. None also during the canary of another version."""
    if draft.serving is None:
        # Without an endpoint, the version gets its traffic after the move, in which the watch began.
        return "All" if watch.start_time else "None"
    status, observed = canary.serving_status(draft), draft.observed.endpoint
    if status.version != watch.version:
        return "None"
    if observed is not None and observed.problem is None:
        versions = {route.version for route in routes_of(observed.served) if route.percent}
        if watch.version not in versions:
            return "None"
        if len(versions) > 1:
            return "Part"
    return "Part" if status.step else "All"


def _update_start(draft: Draft, watch: Watch, traffic: Literal["None", "Part", "All"]) -> Watch:
    """Start the time of the watch once the version has all traffic, and end it when it no longer has."""
    if draft.serving is not None and traffic != "All":
        return watch.model_copy(update={"start_time": None})
    is_served = draft.serving is None or draft.holds(ConditionType.SERVED)
    return watch.model_copy(update={"start_time": draft.now}) if not watch.start_time and is_served else watch


def _find_end(spec: OnRegression, watch: Watch) -> datetime | None:
    """When the watch ends; None while the endpoint does not serve the version alone."""
    return watch.start_time + timedelta(seconds=spec.watch_seconds) if watch.start_time else None


def _report_watching(draft: Draft, spec: OnRegression, watch: Watch) -> None:
    end = _find_end(spec, watch)
    until = format_time(end) if end else f"{spec.watch_seconds} s after the endpoint serves it alone"
    draft.remember(watch=watch)
    draft.set(
        ConditionType.REGRESSED,
        False,
        ConditionReason.WATCHING,
        f"version {watch.version} is watched until {until}: {_name(spec)} must be {describe_bounds(spec.min, spec.max)}",
    )
    if end:
        draft.requeue_after(max((end - draft.now).total_seconds(), 0))


def _handle_unreadable(draft: Draft, spec: OnRegression, watch: Watch, reading: Reading) -> None:
    """Say why there is no number. After the end of the watch, this stays."""
    problem = reading.problem or Problem(ConditionReason.METRIC_INCONCLUSIVE, "")
    is_over = _is_over(draft, spec, watch)
    consequence = "the watch is over" if is_over else "the operator asks again"
    message = f"{_name(spec)} of version {watch.version} is unknown, and no alias moves: {problem.message}; {consequence}"
    draft.remember(watch=None if is_over else _without_breach(watch))
    draft.set(ConditionType.REGRESSED, None, problem.reason, message)


def _handle_good(draft: Draft, spec: OnRegression, watch: Watch) -> None:
    if not _is_over(draft, spec, watch):
        _report_watching(draft, spec, _without_breach(watch))
        return
    message = f"version {watch.version} was watched for {spec.watch_seconds} s, and {_name(spec)} is {describe_bounds(spec.min, spec.max)}"
    draft.remember(watch=None)
    draft.set(ConditionType.REGRESSED, False, ConditionReason.WATCHED, message)


def _is_over(draft: Draft, spec: OnRegression, watch: Watch) -> bool:
    end = _find_end(spec, watch)
    return end is not None and draft.now >= end


def _handle_inherited(draft: Draft, spec: OnRegression, watch: Watch) -> None:
    """Report a number that was out of bounds before the version had traffic, for which the version is not the cause."""
    is_over = _is_over(draft, spec, watch)
    consequence = "the watch is over" if is_over else "a breach counts once the number has been good"
    message = (
        f"{_name(spec)} has not been {describe_bounds(spec.min, spec.max)} since before version {watch.version} had traffic, so alias "
        f"{draft.spec.alias} stays; {consequence}"
    )
    draft.remember(watch=None if is_over else _without_breach(watch))
    draft.set(ConditionType.REGRESSED, None, ConditionReason.BREACHED, message)


def _handle_breach(draft: Draft, spec: OnRegression, watch: Watch, value: float) -> None:
    """Record since when the number is out of bounds. If that is long enough, withhold the version; the policy `withdraw` then moves the alias.

    NB: a breach that began during the watch counts beyond its end.
    """
    before, terms = draft.promotion.status.watch, _digest_terms(spec)
    # A breach of another query or of other bounds starts the time again.
    begun = watch.breach_time if watch.terms == terms else None
    since = begun or draft.now
    watch = _count_seconds(draft, spec, watch, terms)
    draft.remember(watch=watch)
    remaining = spec.for_seconds - (watch.breach_seconds or 0)
    breach = f"{_name(spec)} is {format_number(value)}, which is not {describe_bounds(spec.min, spec.max)}"
    # NB: the previous version is read only once the status has a breach.
    if remaining <= 0 and before is not None and before.breach_time is not None:
        _withhold(draft, spec, watch.version, breach)
        return
    draft.requeue_after(max(remaining, 0))
    condition = draft.condition(ConditionType.REGRESSED)
    if begun is not None and condition and condition.reason == ConditionReason.BREACHED:
        # The number may differ in each pass, and the status is not written for that.
        return
    message = (
        f"version {watch.version}: {breach} since {format_time(since)}; if it stays so for {spec.for_seconds} s, alias "
        f"{draft.spec.alias} moves back"
    )
    draft.set(ConditionType.REGRESSED, None, ConditionReason.BREACHED, message)


def _count_seconds(draft: Draft, spec: OnRegression, watch: Watch, terms: str) -> Watch:
    """Add the time since the last reading to the breach, or begin the breach."""
    if watch.breach_time is None or watch.reading_time is None or watch.terms != terms:
        begun = {"breach_time": draft.now, "breach_seconds": 0.0, "reading_time": draft.now, "terms": terms}
        return watch.model_copy(update=begun)
    poll_seconds = draft.settings.poll_seconds
    elapsed = (draft.now - watch.reading_time).total_seconds()
    counted = (watch.breach_seconds or 0) + min(max(elapsed, 0), _MAX_POLLS_PER_READING * poll_seconds)
    # NB: the write of the status causes another pass, which must not write again.
    if 0 <= elapsed < poll_seconds / 2 and counted < spec.for_seconds:
        return watch
    return watch.model_copy(update={"breach_seconds": counted, "reading_time": draft.now})


def _withhold(draft: Draft, spec: OnRegression, version: str, breach: str) -> None:
    """Mark the version as bad, so that the alias moves to the previous version; without one, only report the regression."""
    alias, previous = draft.spec.alias, draft.status.previous
    cause = f"version {version} regressed: {breach}, for {spec.for_seconds} s"
    draft.remember(watch=None)
    if previous is None or draft.observed.versions.get(previous) is None:
        missing = f"version {previous} no longer exists" if previous else "no version had it before"
        message = f"{cause}; alias {alias} stays, because {missing}: set spec.rollbackTo or register another version"
    else:
        message = f"{cause}; alias {alias} moves back to version {previous}"
        draft.withhold(version, previous, message, reason="Regressed")
    draft.set(ConditionType.REGRESSED, True, ConditionReason.REGRESSED, message)


def _without_breach(watch: Watch) -> Watch:
    return watch.model_copy(
        update={"breach_time": None, "breach_seconds": None, "reading_time": None, "terms": None}
    )


def _digest_terms(spec: OnRegression) -> str:
    """Digest of what makes a number a breach."""
    number = spec.prometheus.to_json() if spec.prometheus else spec.endpoint_metric
    return digest([number, spec.min, spec.max])


def _name(spec: OnRegression) -> str:
    """The name of the number in messages."""
    query = spec.prometheus
    return query.name or shorten(query.query, _MAX_NAME_CHARS) if query else str(spec.endpoint_metric)
