"""The canary: the traffic of a new version grows in steps, automatically while its gates pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import Canary, Route, ServingStatus
from finetune_operator.modelpromotion.decide import gates
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.versions import main_version
from finetune_operator.registry.base import ModelVersion
from finetune_operator.text import format_time


@dataclass(frozen=True)
class Verdicts:
    """The messages of the canary gates that failed or are inconclusive; both are empty if all gates passed."""

    failed: str = ""
    unclear: str = ""


def step_fields(number: int | None) -> dict[str, Any]:
    """Fields of status.serving at the start of a step (None for no step). The time of the step starts once its routes are in force."""
    return {"step": number, "step_start_time": None, "next_step_time": None}


NO_STEP = step_fields(None) | {"steps": None}


def is_possible(draft: Draft, version: str, saved: Sequence[Route]) -> bool:
    """Whether the spec has a canary, and the routes from before the rollout (`saved`) give most traffic to another version."""
    return _canary(draft) is not None and main_version(saved) not in (None, version)


def canary_routes(draft: Draft, version: str) -> list[Route] | None:
    """The routes of the current step; None without a step. If the canary in the spec changed, the step in the status is corrected."""
    status, canary = serving_status(draft), _canary(draft)
    base_version = main_version(status.saved or [])
    if canary is None or base_version is None or not status.step:
        draft.update(serving=status.model_copy(update=NO_STEP))
        return None
    count = len(canary.steps)
    if status.step > count:
        # Removing steps from the spec must not give all traffic to the new version: the last remaining step applies.
        draft.update(serving=status.model_copy(update=step_fields(count)))
    percent = canary.steps[min(status.step, count) - 1].percent
    draft.update(serving=serving_status(draft).model_copy(update={"steps": count}))
    return [Route(version=version, percent=percent), Route(version=base_version, percent=100 - percent)]


def judge_step(draft: Draft, version: str) -> Verdicts:
    """The verdicts of the canary gates on the version; empty without a step or without gates."""
    canary = _canary(draft)
    if canary is None or not serving_status(draft).step or not canary.gates:
        return Verdicts()
    candidate = draft.observed.versions.get(version)
    if candidate is None:
        return Verdicts(unclear=f"the registry has no version {version}")
    base = draft.observed.versions.get(main_version(serving_status(draft).saved or []) or "")
    endpoint = draft.observed.endpoint
    traffic = endpoint.traffic if endpoint else {}
    candidate = _add_traffic(candidate, traffic)
    base = _add_traffic(base, traffic) if base else None
    judged = gates.judge(canary.gates, candidate, base, which="which receives the rest of the traffic")

    def join_messages(verdict: str) -> str:
        return "; ".join(f"{item.name}: {item.message}" for item in judged if item.verdict == verdict)

    return Verdicts(failed=join_messages("Failed"), unclear=join_messages("Inconclusive"))


def _add_traffic(version: ModelVersion, traffic: Mapping[str, Mapping[str, float]]) -> ModelVersion:
    """A version with the metrics of its requests, which the endpoint exports. A gate reads a tag rather than a metric of the same name.

    Args:
        traffic: by version, the value of each metric by its name.
    """
    metrics = {**version.metrics, **traffic.get(version.version, {})}
    return dataclasses.replace(version, metrics=metrics)


def take_next_step(draft: Draft, verdicts: Verdicts) -> bool:
    """Take the next step if the time of the current step is over and its gates could be judged. After the last step, the canary ends.

    NB: the caller has checked that no gate failed, and that the routes of the step are in force, so the time of the step starts
    now at the latest.

    Returns:
        Whether the step was taken.
    """
    status, canary = serving_status(draft), _canary(draft)
    if canary is None or not status.step:
        return False
    start = status.step_start_time or draft.now
    due = start + timedelta(seconds=canary.steps[status.step - 1].duration_seconds)
    if draft.now >= due and not verdicts.unclear:
        is_last = status.step == len(canary.steps)
        draft.update(serving=status.model_copy(update=step_fields(None if is_last else status.step + 1)))
        return True
    draft.update(serving=status.model_copy(update={"step_start_time": start, "next_step_time": due}))
    current = describe_step(draft)
    if verdicts.unclear:
        message = f"{current}; the next step waits until this one can be judged: {verdicts.unclear}"
        draft.set(ConditionType.SERVED, False, ConditionReason.CANARY_INCONCLUSIVE, message)
    else:
        draft.set(
            ConditionType.SERVED,
            False,
            ConditionReason.CANARY,
            f"{current}; the next step is due at {format_time(due)}",
        )
    remaining_seconds, poll_seconds = (due - draft.now).total_seconds(), draft.settings.poll_seconds
    draft.requeue_after(min(poll_seconds, remaining_seconds) if remaining_seconds > 0 else poll_seconds)
    return False


def describe_step(draft: Draft) -> str | None:
    """The current step and its share of the traffic, as text; None without a step, or if the spec no longer has the step."""
    status, canary = serving_status(draft), _canary(draft)
    if canary is None or not status.step or status.step > len(canary.steps):
        return None
    percent, count = canary.steps[status.step - 1].percent, len(canary.steps)
    return f"version {status.version} gets {percent}% of the traffic, step {status.step} of {count}"


def _canary(draft: Draft) -> Canary | None:
    return draft.serving.canary if draft.serving else None


def serving_status(draft: Draft) -> ServingStatus:
    """status.serving; an empty one if it is not set."""
    return draft.status.serving or ServingStatus()
