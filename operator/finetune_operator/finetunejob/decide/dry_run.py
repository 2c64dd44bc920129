"""Checks the training and evaluation pods of a job in dry runs of the API server, before the operator creates children.

Mistakes must be found early: a preparation takes hours, and a correction of spec.pods does not change the pods of an existing Job. Until
the data are prepared, the check runs once for each generation of the spec, and again after the operator was restarted, perhaps with other
defaults or another image of the trainer. It is repeated after a rejection or an error, since the policies of the API server, the defaults
of the chart and Kueue's queues can change while the spec does not.

If a preparation runs first, the job's queue must exist before the preparation starts. A full quota does not stop the job: its pods need
the quota only after the preparation, when other jobs may have ended.
"""

from __future__ import annotations

from finetune_crds.base import API_VERSION, Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.pods import Pods
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import BLOCKING_REASONS, DryRunAnswer
from finetune_operator.finetunejob.pods import evaluation_pod, gang, queueing
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion

# The Job controller gives the first pod of an Indexed Job this entry as a label and as an annotation.
_FIRST_INDEX = {names.ANNOTATION_INDEX: "0"}


def check_pods(draft: Draft) -> Outcome:
    """End the pass until the API server has checked the pods. While their check fails, end each pass of a job that has not started."""
    if draft.holds(ConditionType.PREPARED):
        # The training follows, and its real pods show problems themselves.
        draft.unset(ConditionType.PODS_ADMITTED)
        return Continue
    if draft.spec.suspend:
        # A later policy ends the pass, so no pod is created.
        return Continue
    pods_admitted = draft.condition(ConditionType.PODS_ADMITTED)
    is_of_generation = pods_admitted is not None and pods_admitted.observed_generation == draft.generation
    is_current = is_of_generation and draft.observed.has_checked_pods
    if not is_current or _is_blocking(pods_admitted):
        answer = draft.observed.dry_run_answer
        if answer is None:
            draft.dry_runs += build_dry_run_objects(draft)
            return Stop
        pods_admitted = _record(draft, answer)
        if answer.retry_seconds is not None:
            draft.requeue_after(answer.retry_seconds)
    has_started = draft.status.start_time is not None
    return Stop if _is_blocking(pods_admitted) and not has_started else Continue


def build_dry_run_objects(draft: Draft) -> list[Json]:
    """Build the objects that the dry run creates.

    These are a training pod, since quotas and Pod Security check pods, not Jobs; the training Job, if a preparation runs first; the
    Job and the pod of the evaluation; and the objects of the backend, for example a review of whether Spark's driver may create
    executors.
    """
    training_job = gang.build_job(draft, draft.status.attempt or 1)
    evaluation_jobs = _build_evaluation_jobs(draft)
    jobs = [*([training_job] if draft.spec.prepare else []), *evaluation_jobs]
    backend = backends.find_backend(draft.spec)
    reviews = backend.build_dry_runs(draft) if backend else ()
    pods = [_build_first_pod(draft, job) for job in (training_job, *evaluation_jobs)]
    return [*jobs, *pods, *reviews]


def _build_evaluation_jobs(draft: Draft) -> list[Json]:
    """The Job of the evaluation, with a placeholder version; empty without an evaluation."""
    register = draft.spec.register_
    if draft.spec.evaluation is None or register is None:
        return []
    return [evaluation_pod.build_job(draft, RegisteredVersion(register.model or draft.ftj.name, "1"))]


def _build_first_pod(draft: Draft, job: Json) -> Json:
    """The first pod of a Job.

    It has the labels that the Job controller would add, and an owner, since policies may refuse pods without a controller. The owner is
    the FineTuneJob, since the Job does not exist.
    """
    template, meta = job["spec"]["template"], job["metadata"]
    pod_metadata = template.get("metadata", {})
    template_annotations = pod_metadata.get("annotations") or {}
    index_entry = _FIRST_INDEX if job["spec"].get("completionMode") == "Indexed" else {}
    probe_annotations = template_annotations
    # NB: annotations that are not a mapping stay as they are, so that the API server rejects them.
    if isinstance(template_annotations, dict):
        probe_annotations = {**template_annotations, **index_entry}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **pod_metadata,
            "name": f"{meta['name']}-0",
            "namespace": meta["namespace"],
            "labels": {
                **pod_metadata.get("labels", {}),
                **_job_labels(meta["name"], draft.ftj.uid),
                **index_entry,
            },
            "annotations": probe_annotations,
            "ownerReferences": [_controller(draft)],
        },
        "spec": template["spec"],
    }


def _job_labels(name: str, uid: str) -> dict[str, str]:
    """Labels of the pods of a Job, with their legacy names."""
    prefixes = ("batch.kubernetes.io/", "")
    return {
        f"{prefix}{key}": value
        for prefix in prefixes
        for key, value in (("job-name", name), ("controller-uid", uid))
    }


def _controller(draft: Draft) -> Json:
    """The owner reference, without blockOwnerDeletion, which would require a permission on the owner's finalizers."""
    ftj = draft.ftj
    return {
        "apiVersion": API_VERSION,
        "kind": "FineTuneJob",
        "name": ftj.name,
        "uid": ftj.uid,
        "controller": True,
    }


def _record(draft: Draft, answer: DryRunAnswer) -> Condition | None:
    """Record the answer, and return its condition. Without a preparation, the status keeps only an answer that blocks the job."""
    message = f"{answer.message}{_remedy(draft, answer)}"
    draft.set(ConditionType.PODS_ADMITTED, answer.admitted, answer.reason, message)
    pods_admitted = draft.condition(ConditionType.PODS_ADMITTED)
    # Without a preparation, the real pods start now, and show any other problem themselves.
    if pods_admitted and draft.spec.prepare is None and not _is_blocking(pods_admitted):
        draft.unset(ConditionType.PODS_ADMITTED)
    return pods_admitted


def _remedy(draft: Draft, answer: DryRunAnswer) -> str:
    """Return what to correct, as the end of a sentence; empty for a reason without a remedy. The pods come from the spec and the chart."""
    reason = answer.reason
    role = "evaluate" if answer.component == names.EVALUATE else "train"
    fields = f"spec.pods.{role}"
    if draft.settings.defaults.pods != Pods():
        fields += " or defaults.pods of the chart"
    if reason == ConditionReason.POD_TEMPLATE_INVALID:
        return f": correct {fields}, and the job continues"
    if reason == ConditionReason.POD_REJECTED:
        return f": correct {fields}, or the policy, and the job continues"
    queue = draft.spec.run_policy.queue_name
    if reason == ConditionReason.QUEUE_INADMISSIBLE and queue:
        return f": {_queue_remedy(draft, queue)}, and the job continues"
    return ""


def _queue_remedy(draft: Draft, queue: str) -> str:
    if queueing.is_from_installation(draft, queue):
        return (
            f"create LocalQueue {queue} (defaults.queueName of the chart), name another queue in spec.runPolicy.queueName, or "
            f"{queueing.describe_opt_out(draft, queue)}"
        )
    return "correct or remove spec.runPolicy.queueName, or create the LocalQueue"


def _is_blocking(pods_admitted: Condition | None) -> bool:
    """Whether the result of the dry run, if there is one, keeps the job from starting."""
    return pods_admitted is not None and pods_admitted.reason in BLOCKING_REASONS
