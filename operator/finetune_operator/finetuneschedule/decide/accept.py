"""Whether the schedule can be carried out: its times are valid, and the API server accepts the FineTuneJobs of its template."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetuneschedule.decide.draft import Draft
from finetune_operator.policy.cron import Cron, CronError
from finetune_operator.policy.result import Continue, Outcome, Stop

_NO_SOURCE = (
    "spec.onlyIfDataChanged requires spec.jobTemplate.spec.data.source: the preparation of the source finds out whether the data has "
    "changed, and prepared splits or a command that reads its own data have none"
)
_SWEEP = (
    "spec.onlyIfDataChanged must be false when spec.jobTemplate.spec.sweep is set: the trials of a sweep prepare the data, and the sweep "
    "trains in any case"
)


def accept(draft: Draft) -> Outcome:
    """Accept the schedule, or refuse it. Ends the pass until the API server has checked the template of this generation in a dry run.

    The dry run of a refused template is repeated in each pass, since a policy or the schema of FineTuneJobs can change too.
    """
    if draft.observed.refusal:
        return draft.refuse(*draft.observed.refusal)
    mistake = _find_mistake(draft)
    if mistake:
        return draft.refuse(ConditionReason.INVALID_SPEC, mistake)
    accepted = draft.condition(ConditionType.ACCEPTED)
    if accepted and accepted.status == "True" and accepted.observed_generation == draft.generation:
        return Continue
    answer = draft.observed.dry_run_answer
    if answer is None:
        draft.dry_run = draft.build_job(draft.cron.find_next(draft.now))
        return Stop
    if not answer.admitted:
        return draft.refuse(answer.reason, answer.message)
    draft.set(ConditionType.ACCEPTED, True, answer.reason, answer.message)
    return Continue


def _find_mistake(draft: Draft) -> str | None:
    """A message for a mistake that the schema cannot detect."""
    if draft.schedule.spec is None:
        return draft.schedule.invalid or "the spec cannot be read"
    try:
        Cron.parse(draft.spec.schedule, draft.spec.time_zone)
    except CronError as error:
        return str(error)
    return (
        _find_obstacle_to_comparison(draft.spec.job_template.spec)
        if draft.spec.only_if_data_changed
        else None
    )


def _find_obstacle_to_comparison(job: Json) -> str | None:
    """Why the data of a FineTuneJob with this spec cannot be compared with that of an earlier one."""
    if job.get("sweep"):
        return _SWEEP
    data = job.get("data")
    has_source = isinstance(data, dict) and bool(data.get("source"))
    return None if has_source else _NO_SOURCE
