"""Log the endpoint's requests to the table of the spec, and never to a table that was removed from the spec.

The status records a table before the operator starts logging to it. So the operator recognizes its own table after the table was
removed from the spec. While the spec names no table, logging that another client set up is not touched.
"""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import EndpointChange, InferenceTable
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import name_of, routes_of, update_status
from finetune_operator.modelpromotion.decide.endpoint_change import was_refused
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, LogRequests, StopLogging


def stop_logging(draft: Draft, endpoint: Endpoint) -> None:
    """Stop logging requests to a table that the spec no longer names.

    This does not wait for a rollout: once the table is removed from the spec, no more requests may appear in it.
    """
    table = endpoint.logged_to
    if table is None or not _is_stale(draft, table):
        if _spec_table(draft) is None:
            # The operator's logging has stopped.
            update_status(draft, inference_table=None)
        return
    if not was_refused(draft):
        schema = f"{table.catalog}.{table.schema_}"
        message = f"endpoint {name_of(draft)} is being configured to stop logging requests to {schema}"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
    _expect_revision(draft, endpoint)
    # NB: the callers call this function last, so that a rollback of the endpoint comes before this request, which may be rejected.
    draft.actions.append(StopLogging())
    draft.requeue_after(draft.settings.poll_seconds)


def ensure_logging(draft: Draft, endpoint: Endpoint) -> bool:
    """Return whether the endpoint logs requests as in the spec. If not, record and request the change."""
    spec_table, table = _spec_table(draft), endpoint.logged_to
    if table is not None and _is_stale(draft, table):
        # `stop_logging` ends the logging to this table in the same pass.
        return False
    if spec_table is None:
        return True
    written_status = draft.promotion.status.serving
    written_table = written_status.inference_table if written_status else None
    update_status(draft, inference_table=spec_table)
    if table is not None:
        # It is not stale, so it is the table of the spec.
        return True
    if not was_refused(draft):
        message = f"endpoint {name_of(draft)} is being configured to log its requests"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
    if written_table != spec_table:
        # This pass records the table, and the next one requests the change.
        draft.requeue_after(0)
        return False
    _expect_revision(draft, endpoint)
    draft.actions.append(LogRequests())
    draft.requeue_after(draft.settings.poll_seconds)
    return False


def _spec_table(draft: Draft) -> InferenceTable | None:
    return draft.promotion.backend.inference_table if draft.promotion.backend else None


def _is_stale(draft: Draft, table: InferenceTable) -> bool:
    """Whether the table differs from the spec's table or, if the spec names no table, is the table that the operator set up before."""
    spec_table, recorded_table = _spec_table(draft), canary.serving_status(draft).inference_table
    if spec_table is None:
        return recorded_table is not None and _is_table(table, recorded_table)
    return not _is_table(table, spec_table)


def _is_table(table: InferenceTable, expected: InferenceTable) -> bool:
    """Whether a table is the expected one. Any prefix fits if the expected table has none: the endpoint then chooses the prefix."""
    same_schema = (table.catalog, table.schema_) == (expected.catalog, expected.schema_)
    return same_schema and expected.table_prefix in (None, table.table_prefix)


def _expect_revision(draft: Draft, endpoint: Endpoint) -> None:
    """Record a change with the same routes: changed logging gives the endpoint a new revision, which must count as the operator's."""
    status = canary.serving_status(draft)
    is_configuring = any(isinstance(item, ConfigureEndpoint) for item in draft.actions)
    if status.change is not None:
        if not is_configuring and status.change.revision == endpoint.revision:
            # The recorded change was not requested yet: its revision is still current. A later pass records it with the new revision.
            update_status(draft, change=None)
    elif status.settings is not None and not endpoint.failed and not endpoint.updating:
        # NB: during a failed or current change of another client, the record would claim that change for the operator.
        routes = routes_of(endpoint.served)
        update_status(
            draft, change=EndpointChange(routes=routes, settings=status.settings, revision=endpoint.revision)
        )
