"""Decides whether this version of the operator can run a spec. A field that the version does not support is refused, never ignored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.decide import parameters
from finetune_operator.finetunejob.draft import mistakes
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import Refusal, refuse
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.pods import own_code
from finetune_operator.finetunejob.pods.workspace import workspace_mistakes
from finetune_operator.finetunejob.preparation import backends, catalog, conf_credentials
from finetune_operator.finetunejob.resolve import resolve, resolved
from finetune_operator.finetunejob.sweep import metric
from finetune_operator.finetunejob.sweep.objects import delivers_model
from finetune_operator.policy.address import find_passwords
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.settings import DATABRICKS, UNITY_CATALOG, Settings

_NO_STORAGE = (
    "{field} is missing: install the chart with defaults.storage, in which each job gets a folder, or create a FineTuneJob with another "
    "name and this field"
)
_MISMATCH = (
    "{mistakes}; the job does not fit the values of the chart: change the values, or create a FineTuneJob with another name and other "
    "fields"
)
# The two kinds of installation. A job without spec.tracking.uri may run with either.
_WITH_DATABRICKS, _WITH_MLFLOW = Settings(tracking_uri=DATABRICKS), Settings(tracking_uri="http://mlflow")
_NO_SERVER = (
    "spec.register requires an MLflow server: install the chart with tracking.uri, or create a FineTuneJob with another name and "
    "spec.tracking.uri"
)
_NO_EVALUATIONS = (
    "sweep.rungs and sweep.metric eval_reward_accuracy require an MLflow server, which has the evaluations of the trials: install the chart "
    "with tracking.uri, or create a FineTuneJob with another name and spec.tracking.uri"
)


def accept(draft: Draft) -> Outcome:
    """Accept the job, fail it with all its permanent mistakes in one message, or report the first obstacle.

    Permanent are mistakes in immutable fields that no values of the chart can correct. Until the job is accepted, each pass looks again for
    obstacles, which can change: pod templates, the values of the chart, and which fields the operator's version supports.
    """
    if draft.ftj.spec is None:
        return _leave_alone(draft)
    if draft.holds(ConditionType.ACCEPTED):
        _record_acceptance(draft)
        return Continue
    if _was_accepted(draft):
        return _accept(draft)
    spec_mistakes = [*find_passwords(draft.spec.tracking), *permanent_mistakes(draft.ftj)]
    if spec_mistakes:
        return refuse(
            draft, ConditionType.ACCEPTED, Refusal(ConditionReason.INVALID_SPEC, "; ".join(spec_mistakes))
        )
    obstacle = next(obstacles(draft.spec, draft.settings, draft.ftj.namespace), None)
    if obstacle:
        reason, message = obstacle
        draft.set(ConditionType.ACCEPTED, False, reason, message)
        return Stop
    return _accept(draft)


def _accept(draft: Draft) -> Outcome:
    """Accept the job, and record the values of the chart that stay the same for its life."""
    if draft.status.resolved is None:
        draft.update(
            resolved=resolved(
                draft.spec,
                namespace=draft.ftj.namespace,
                name=draft.ftj.name,
                defaults=draft.settings.defaults,
            )
        )
    _record_acceptance(draft)
    return Continue


def _record_acceptance(draft: Draft) -> None:
    """Record that the spec is valid, and warn about paths at which no volume is mounted. A later pod template may mount one there."""
    reason, message = ConditionReason.ACCEPTED, "the spec can be run"
    paths = parameters.unmounted_paths(draft.spec)
    if paths:
        reason = ConditionReason.ACCEPTED_WITH_WARNING
        folders = "a folder" if len(paths) == 1 else "folders"
        message = (
            f"{', '.join(paths)}, {folders} of a Databricks workspace, which pods read only from a mounted volume: mount a volume at the "
            "path in spec.pods, or create a FineTuneJob with another name and object storage; ignore this if the command accesses the "
            "workspace itself"
        )
    before = draft.condition(ConditionType.ACCEPTED)
    # A condition that would say the same stays as it is, with the generation at which it was set.
    if before is None or (before.status, before.reason, before.message) != ("True", reason, message):
        draft.set(ConditionType.ACCEPTED, True, reason, message)


def _leave_alone(draft: Draft) -> Outcome:
    """End the pass without a verdict: the API server accepted this spec, so another version of the operator can read it."""
    message = (
        f"this version of the operator cannot read the spec ({draft.ftj.invalid}) and does not change the job and "
        "its children: install a version that can read the spec"
    )
    draft.set(ConditionType.ACCEPTED, None, ConditionReason.SPEC_UNREADABLE, message)
    return Stop


def _was_accepted(draft: Draft) -> bool:
    """Whether the job was accepted before Accepted became Unknown: only accepted jobs have a start time, or resolved values."""
    accepted = draft.condition(ConditionType.ACCEPTED)
    unknown = accepted is not None and accepted.status == "Unknown"
    return unknown and (draft.status.start_time is not None or draft.status.resolved is not None)


def permanent_mistakes(ftj: FineTuneJob) -> list[str]:
    """List the mistakes in immutable fields that no values of the chart can correct; empty if the spec cannot be read."""
    if ftj.written is None:
        return []
    # Without defaults: a mistake in a default of the chart is not permanent.
    spec = resolve(ftj.written, namespace=ftj.namespace, name=ftj.name, earlier=None, defaults=Defaults())
    # No value of the chart corrects a mistake that both kinds of installation have.
    mlflow_mistakes = [*mistakes_of_fixed_fields(spec, _WITH_MLFLOW)]
    return [
        mistake for mistake in mistakes_of_fixed_fields(spec, _WITH_DATABRICKS) if mistake in mlflow_mistakes
    ]


def mistakes_of_fixed_fields(spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
    """Yield the mistakes in immutable fields, given the values of the chart."""
    yield from mistakes.of_learning_rate(spec)
    yield from own_code.mistakes(spec.trainer)
    yield from parameters.unreadable_secrets(spec)
    yield from workspace_mistakes(spec, settings)
    backend = backends.find_backend(spec)
    if backend:
        yield from backend.find_mistakes(spec, settings)
    yield from catalog.mistakes(spec)
    yield from conf_credentials.find_mistakes(spec)


def mistakes_of_pods(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield the mistakes in spec.pods, which can be corrected. A mistake that several roles share appears once."""
    backend = backends.find_backend(spec)
    of_preparation = backend.find_pod_mistakes(spec) if backend else ()
    of_roles = (mistakes.of_training(spec), of_preparation, mistakes.of_evaluation(spec))
    yield from dict.fromkeys(itertools.chain(*of_roles))


def obstacles(
    spec: FineTuneJobSpec, settings: Settings, namespace: str
) -> Iterator[tuple[ConditionReason, str]]:
    """Yield the reasons why a job must wait: its spec, the operator, or the values of the chart must change."""
    pod_mistakes = [*mistakes_of_pods(spec)]
    if pod_mistakes:
        yield ConditionReason.POD_TEMPLATE_INVALID, "; ".join(pod_mistakes)
    unsupported = [*unsupported_fields(spec)]
    if unsupported:
        message = f"this version of the operator does not support {'; '.join(unsupported)}; the job waits for a version that does"
        yield ConditionReason.NOT_IMPLEMENTED, message
    tracking_server, _ = settings.servers(spec.tracking)
    if spec.register_ and not tracking_server:
        yield ConditionReason.MLFLOW_NOT_CONFIGURED, _NO_SERVER
    if spec.sweep and metric.needs_evaluations(spec.sweep) and not tracking_server:
        yield ConditionReason.MLFLOW_NOT_CONFIGURED, _NO_EVALUATIONS
    field_mistakes = [*mistakes_of_fixed_fields(spec, settings)]
    if field_mistakes:
        yield ConditionReason.INSTALLATION_MISMATCH, _MISMATCH.format(mistakes="; ".join(field_mistakes))
    yield from _find_preparation_obstacles(spec, settings, namespace)
    stops_trials = spec.sweep is not None and spec.sweep.rungs is not None
    delivers_trial = spec.sweep is not None and delivers_model(spec)
    needs_checkpoint = spec.training.select == "Best" or delivers_trial or stops_trials
    if needs_checkpoint and spec.checkpoint is None:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.checkpoint")
    if spec.checkpoint and not spec.checkpoint.uri:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.checkpoint.uri")


def _find_preparation_obstacles(
    spec: FineTuneJobSpec, settings: Settings, namespace: str
) -> Iterator[tuple[ConditionReason, str]]:
    backend = backends.find_backend(spec)
    if backend:
        yield from backend.find_obstacles(spec, settings, namespace)
    if missing_catalog := catalog.find_missing_catalog(spec):
        yield ConditionReason.CATALOG_NOT_CONFIGURED, missing_catalog
    if missing_workspace := catalog.find_missing_workspace(spec, settings):
        yield ConditionReason.DATABRICKS_NOT_CONFIGURED, missing_workspace
    if spec.prepare and not spec.prepare.output:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.data.prepare.output")


def unsupported_fields(spec: FineTuneJobSpec) -> Iterator[str]:
    """Fields of the API that this version does not support, each with an alternative."""
    addresses = (
        ("uri", spec.tracking.uri, DATABRICKS),
        ("registryUri", spec.tracking.registry_uri, UNITY_CATALOG),
    )
    for name, uri, databricks_uri in addresses:
        if uri and uri != databricks_uri and not uri.startswith(("http://", "https://")):
            yield f"tracking.{name} {uri} (use the http or https address of an MLflow server, or {databricks_uri})"
