"""Where the endpoint's requests are logged: to the table of the spec, and to no table that the spec had before.

The status records a table before the operator has requests logged to it. So a table that is removed from the spec is known as
the operator's own, and what another client has logged without a word of the spec is left alone.
"""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import DatabricksServing, EndpointChange, InferenceTable
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import in_force, note
from finetune_operator.modelpromotion.decide.endpoint_change import was_refused
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, LogRequests, StopLogging


def stop_logging(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> None:
    """Have no more requests logged to a table that the spec no longer names.

    It waits for no rollout: after the spec says so, nobody may find requests in that table.
    """
    found = endpoint.logged_to
    if found is None or not _is_stale(draft, spec, found):
        if spec.inference_table is None:
            note(draft, inference_table=None)
        return
    if not was_refused(draft):
        where = f"{found.catalog}.{found.schema_}"
        message = f"endpoint {spec.endpoint} is being configured to log no more requests in {where}"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
    _expect_revision(draft, endpoint)
    # NB: after the other actions. An endpoint that goes back must not wait for a gateway that refuses.
    draft.actions.append(StopLogging(spec))
    draft.requeue_after(draft.settings.poll_seconds)


def is_logging(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> bool:
    """Whether the endpoint logs requests as in the spec; requests it if not."""
    wanted, found = spec.inference_table, endpoint.logged_to
    if found is not None and _is_stale(draft, spec, found):
        return False
    if wanted is None:
        return True
    held = draft.promotion.status.serving
    recorded = held.inference_table if held else None
    note(draft, inference_table=wanted)
    if found is not None:
        return True
    if not was_refused(draft):
        message = f"endpoint {spec.endpoint} is being configured to log its requests"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
    if recorded != wanted:
        draft.requeue_after(0)
        return False
    _expect_revision(draft, endpoint)
    draft.actions.append(LogRequests(spec))
    draft.requeue_after(draft.settings.poll_seconds)
    return False


def _is_stale(draft: Draft, spec: DatabricksServing, found: InferenceTable) -> bool:
    """Whether requests are logged to another table than the spec names, or to one that it named before."""
    wanted, own = spec.inference_table, canary.known_of(draft).inference_table
    if wanted is None:
        return own is not None and _is_table(found, own)
    return not _is_table(found, wanted)


def _is_table(found: InferenceTable, wanted: InferenceTable) -> bool:
    """Whether a table is the wanted one. Without a prefix in the spec, Databricks chooses it."""
    same = (found.catalog, found.schema_) == (wanted.catalog, wanted.schema_)
    return same and wanted.table_prefix in (None, found.table_prefix)


def _expect_revision(draft: Draft, endpoint: Endpoint) -> None:
    """Record that the endpoint's revision is about to change though its routes are not."""
    known, asked = canary.known_of(draft), any(isinstance(item, ConfigureEndpoint) for item in draft.actions)
    if known.change is not None:
        if not asked and known.change.revision == endpoint.revision:
            # It was not requested yet, and is recorded anew with the new revision.
            note(draft, change=None)
    elif known.settings is not None and not endpoint.failed and not endpoint.updating:
        routes = in_force(endpoint.served)
        note(draft, change=EndpointChange(routes=routes, settings=known.settings, revision=endpoint.revision))
