"""Records the result of a preparation in the status."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PrepResult
from finetune_crds.status import DataStatus
from finetune_crds.status_parts import MAX_DROPPED, Dropped, Redacted
from finetune_operator.finetunejob.draft.draft import Draft


def record_result(draft: Draft, result: PrepResult) -> None:
    """Record the splits: the job is prepared."""
    dropped = [Dropped(step=step, rows=rows) for step, rows in result.dropped.items()]
    redacted = [Redacted(kind=kind, values=values) for kind, values in (result.redacted or {}).items()]
    draft.update(
        data=DataStatus(
            rows=result.rows,
            tokens=result.tokens,
            path=result.path,
            version=result.version,
            digest=result.digest,
            written_by=result.written_by,
            source_version=result.source_version,
            source_revision=result.source_revision,
            feedback_version=result.feedback_version,
            sources=result.sources,
            columns=result.columns,
            dropped=dropped[:MAX_DROPPED] or None,
            redacted=redacted or None,
            evaluation_sets=result.evaluation_sets,
        )
    )
    rows = result.rows
    by = f", written by FineTuneJob {result.written_by}" if result.written_by else ""
    draft.set(
        ConditionType.PREPARED,
        True,
        ConditionReason.PREPARED_WITH_WARNING if result.warnings else ConditionReason.PREPARED,
        f"{_join_warnings(result)}{result.path} version {result.version}{by}: {rows.train} train, {rows.validation} validation, "
        f"{rows.test} test rows{_describe_dropped(dropped)}{_describe_redacted(redacted)}",
    )


def _join_warnings(result: PrepResult) -> str:
    return "".join(f"{warning}. " for warning in result.warnings or [])


def _describe_dropped(dropped: list[Dropped]) -> str:
    """Count the dropped rows by step."""
    lossy = [item for item in dropped if item.rows]
    if not lossy:
        return ""
    steps = ", ".join(f"{item.rows} by {item.step}" for item in lossy)
    return f"; {sum(item.rows for item in lossy)} dropped: {steps}"


def _describe_redacted(redacted: list[Redacted]) -> str:
    """Count the values of each kind that were replaced by placeholders."""
    nonzero = [item for item in redacted if item.values]
    return f"; redacted: {', '.join(f'{item.values} {item.kind}' for item in nonzero)}" if nonzero else ""
