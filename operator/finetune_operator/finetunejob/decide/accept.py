"""Whether this version of the operator can run a spec. What it cannot do yet is refused, never ignored."""

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
from finetune_operator.policy.address import find_passwords
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.settings import DATABRICKS, UNITY_CATALOG, Settings

_NO_STORAGE = (
    "{field} is missing: install the chart with defaults.storage, where each job gets a folder, or apply a job with the field and "
    "another name"
)
_MISMATCH = (
    "{mistakes}; the job does not fit the values of the chart: change the values, or apply a job with other fields "
    "under another name"
)
# A job that names no server may run with either installation.
_INSTALLATIONS = (Settings(tracking_uri=DATABRICKS), Settings(tracking_uri="http://mlflow"))
_NO_SERVER = "spec.register needs an MLflow server: install the chart with tracking.uri, or apply a job with spec.tracking.uri and another name"


def accept(draft: Draft) -> Outcome:
    """Accept the job, or report all mistakes in one message.

    The job fails for mistakes in immutable fields that no installation could run. Mistakes in pod templates, in the values of the
    chart, or that another version of the operator resolves are checked again in each pass until the job is accepted.
    """
    if draft.ftj.spec is None:
        return _leave_alone(draft)
    if draft.holds(ConditionType.ACCEPTED):
        _record_acceptance(draft)
        return Continue
    if _was_at_work(draft):
        return _accept(draft)
    wrong = [*find_passwords(draft.spec.tracking), *permanent_mistakes(draft.ftj)]
    if wrong:
        return refuse(draft, ConditionType.ACCEPTED, Refusal(ConditionReason.INVALID_SPEC, "; ".join(wrong)))
    waits = next(obstacles(draft.spec, draft.settings, draft.ftj.namespace), None)
    if waits:
        draft.set(ConditionType.ACCEPTED, False, *waits)
        return Stop
    return _accept(draft)


def _accept(draft: Draft) -> Outcome:
    draft.update(
        resolved=resolved(
            draft.spec, namespace=draft.ftj.namespace, name=draft.ftj.name, defaults=draft.settings.defaults
        )
    )
    _record_acceptance(draft)
    return Continue


def _record_acceptance(draft: Draft) -> None:
    """Record that the spec is valid, with a warning about paths that the pods may not have. The pod template may mount them later."""
    reason, message = ConditionReason.ACCEPTED, "the spec can be run"
    paths = parameters.unmounted_paths(draft.spec)
    if paths:
        reason = ConditionReason.ACCEPTED_WITH_WARNING
        message = (
            f"pods cannot read folders of a Databricks workspace, but {', '.join(paths)}: mount a volume at the path in spec.pods, or "
            "create a FineTuneJob with another name that uses object storage; ignore this if the command accesses the workspace itself"
        )
    before = draft.condition(ConditionType.ACCEPTED)
    if before is None or (before.status, before.reason, before.message) != ("True", reason, message):
        draft.set(ConditionType.ACCEPTED, True, reason, message)


def _leave_alone(draft: Draft) -> Outcome:
    """End the pass without a verdict: the API server accepted this spec, so another version can read it."""
    message = (
        f"this version of the operator cannot read the spec ({draft.ftj.invalid}) and leaves the job and its children "
        "as they are: install a version that can read it"
    )
    draft.set(ConditionType.ACCEPTED, None, ConditionReason.SPEC_UNREADABLE, message)
    return Stop


def _was_at_work(draft: Draft) -> bool:
    """Whether the job was accepted before Accepted became Unknown: children exist only of accepted jobs."""
    accepted = draft.condition(ConditionType.ACCEPTED)
    unknown = accepted is not None and accepted.status == "Unknown"
    return unknown and draft.status.start_time is not None


def permanent_mistakes(ftj: FineTuneJob) -> list[str]:
    """Mistakes in immutable fields with which no values of the chart can run the job."""
    if ftj.written is None:
        return []
    spec = resolve(ftj.written, namespace=ftj.namespace, name=ftj.name, earlier=None, defaults=Defaults())
    mistakes_by_server = [[*mistakes_of_fixed_fields(spec, settings)] for settings in _INSTALLATIONS]
    return [
        mistake
        for mistake in mistakes_by_server[0]
        if all(mistake in server_mistakes for server_mistakes in mistakes_by_server)
    ]


def mistakes_of_fixed_fields(spec: FineTuneJobSpec, settings: Settings) -> Iterator[str]:
    """Mistakes in immutable fields, with these values of the chart."""
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
    """What is wrong with pods, which can be corrected. What is wrong with all of them is said once."""
    backend = backends.find_backend(spec)
    of_preparation = backend.find_pod_mistakes(spec) if backend else ()
    of_roles = (mistakes.of_training(spec), of_preparation, mistakes.of_evaluation(spec))
    yield from dict.fromkeys(itertools.chain(*of_roles))


def obstacles(
    spec: FineTuneJobSpec, settings: Settings, namespace: str
) -> Iterator[tuple[ConditionReason, str]]:
    """What a job of a namespace waits for: a change of its spec, of the operator, or of the installation."""
    wrong = [*mistakes_of_pods(spec)]
    if wrong:
        yield ConditionReason.POD_TEMPLATE_INVALID, "; ".join(wrong)
    missing = [*unsupported_fields(spec)]
    if missing:
        message = f"this version of the operator does not support {'; '.join(missing)}; the job waits for a version that does"
        yield ConditionReason.NOT_IMPLEMENTED, message
    if spec.register_ and not settings.servers(spec.tracking)[0]:
        yield ConditionReason.MLFLOW_NOT_CONFIGURED, _NO_SERVER
    wrong = [*mistakes_of_fixed_fields(spec, settings)]
    if wrong:
        yield ConditionReason.INSTALLATION_MISMATCH, _MISMATCH.format(mistakes="; ".join(wrong))
    yield from _find_preparation_obstacles(spec, settings, namespace)
    if spec.training.select == "Best" and spec.checkpoint is None:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.checkpoint")
    if spec.checkpoint and not spec.checkpoint.uri:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.checkpoint.uri")


def _find_preparation_obstacles(
    spec: FineTuneJobSpec, settings: Settings, namespace: str
) -> Iterator[tuple[ConditionReason, str]]:
    backend = backends.find_backend(spec)
    if backend:
        yield from backend.find_obstacles(spec, settings, namespace)
    if lacking := catalog.find_missing_catalog(spec):
        yield ConditionReason.CATALOG_NOT_CONFIGURED, lacking
    if lacking := catalog.find_missing_workspace(spec, settings):
        yield ConditionReason.DATABRICKS_NOT_CONFIGURED, lacking
    if spec.prepare and not spec.prepare.output:
        yield ConditionReason.STORAGE_NOT_CONFIGURED, _NO_STORAGE.format(field="spec.data.prepare.output")


def unsupported_fields(spec: FineTuneJobSpec) -> Iterator[str]:
    """Fields of the API that this version does not support, each with an alternative."""
    addresses = (
        ("uri", spec.tracking.uri, DATABRICKS),
        ("registryUri", spec.tracking.registry_uri, UNITY_CATALOG),
    )
    for name, uri, workspace in addresses:
        if uri and uri != workspace and not uri.startswith(("http://", "https://")):
            yield f"tracking.{name} {uri} (use the http or https address of an MLflow server, or {workspace})"
