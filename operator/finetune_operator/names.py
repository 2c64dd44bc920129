"""Names and labels of the objects that the operator creates. The comment after a label, an annotation or a finalizer says who reads it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from finetune_crds.base import GROUP
from finetune_crds.tracking import Tracking

FIELD_MANAGER = "finetune-operator"

FINALIZER = (
    f"{GROUP}/remove-alias"  # the operator: a ModelPromotion that removes its alias when it is deleted
)
RUN_FINALIZER = f"{GROUP}/cancel-run"  # the operator: a FineTuneJob whose Databricks run may be active

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"  # people
LABEL_JOB = "finetune.dev/job"  # people: kubectl logs -l finetune.dev/job=NAME
LABEL_SCHEDULE = "finetune.dev/schedule"  # people: kubectl get ftj -l finetune.dev/schedule=NAME
LABEL_SWEEP = "finetune.dev/sweep"  # people: kubectl get ftj -l finetune.dev/sweep=NAME
LABEL_UID = "finetune.dev/job-uid"  # the operator: which FineTuneJob or ModelPromotion a child belongs to
LABEL_COMPONENT = (
    "finetune.dev/component"  # the operator and people: prep, prep-executor, train, evaluate, gate or copy
)
LABEL_ATTEMPT = "finetune.dev/attempt"  # the operator and people: which training attempt
ANNOTATION_VERSION = "finetune.dev/version"  # the operator and people, on Jobs of evaluations, gates and copies: the version to judge or to copy
ANNOTATION_PROMOTION = "finetune.dev/promotion"  # the operator, on Jobs of gates and copies and their pods: the name of the ModelPromotion
ANNOTATION_RUN = "finetune.dev/mlflow-run"  # the operator, on Jobs of gates and copies: the MLflow run
ANNOTATION_DIGEST = "finetune.dev/digest"  # the operator, on the evaluation's Job: what the results of a custom command depend on
ANNOTATION_ONE_POD = "finetune.dev/began-with-one-pod"
# The operator, on an attempt's Job: the attempt began with one pod, since a server of code or packages did not answer the previous one.
ANNOTATION_START_TIME = "finetune.dev/start-time"
# People, on a FineTuneJob of a FineTuneSchedule: the start time that it was created for, in the time zone of the schedule.
ANNOTATION_TRAINED_DATA = "finetune.dev/trained-data"
# The operator, on a FineTuneJob of a FineTuneSchedule: the digest of the data that its last job trained on; with this data, the job ends.
LABEL_CONTROLLER = "batch.kubernetes.io/controller-uid"  # Kubernetes, on pods: the uid of their Job
# Kubernetes, on pods of an Indexed Job (the first one has it as a label too): the completion index.
ANNOTATION_INDEX = "batch.kubernetes.io/job-completion-index"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"  # Kueue, on Jobs and on a SparkApplication

# Containers of the operator's pods.
PREP_CONTAINER = "prep"
TRAINER_CONTAINER = "trainer"
EVALUATE_CONTAINER = "evaluate"
FETCH_CONTAINER = "fetch"
CHECKOUT_CONTAINER = "checkout"
DEPENDENCIES_CONTAINER = "dependencies"
UPLOAD_CONTAINER = "upload"
DOWNLOAD_CONTAINER = "download"

# Values of LABEL_COMPONENT, also used in names.
PREP = "prep"
EXECUTOR = "prep-executor"
TRAIN = "train"
EVALUATE = "evaluate"
GATE = "gate"
COPY = "copy"

# Shortens the name of a promotion, so that the name of a Job, which becomes a label of its pods, has at most 63 characters.
_MAX_PROMOTION_CHARS = 44

SPARK_ACCOUNT = "finetune-spark"  # created by the chart: the default ServiceAccount of Spark drivers


def scheduled_job_name(schedule: str, start: datetime) -> str:
    """Name of the FineTuneJob of a FineTuneSchedule for a start time: equal for each pass that creates it, as for the Jobs of a CronJob."""
    return f"{schedule}-{int(start.timestamp()) // 60}"


def find_start_time(job: str) -> datetime | None:
    """The start time in the name of a FineTuneJob of a FineTuneSchedule; None if the name has none, because a person made the job."""
    minutes = job.rpartition("-")[2]
    if not re.fullmatch("[1-9][0-9]{0,8}", minutes):
        return None
    return datetime.fromtimestamp(int(minutes) * 60, UTC)


def prep_name(job: str) -> str:
    """Name of the preparation's Job, of the ConfigMap with its recipe, and of the Service of its driver."""
    return f"{job}-{PREP}"


def application_name(job: str, attempt: int) -> str:
    """Name of the SparkApplication of one attempt at the preparation."""
    return f"{job}-{PREP}-{attempt}"


def driver_name(application: str) -> str:
    """Name of the pod of a SparkApplication's driver."""
    return f"{application}-driver"


def prep_lease_name(digest: str) -> str:
    """Name of the Lease that all jobs of a namespace with the same preparation share."""
    return f"finetune-{PREP}-{digest}"


def train_config_name(job: str) -> str:
    """Name of the ConfigMap with the recipe that training pods read."""
    return f"{job}-{TRAIN}"


def train_name(job: str, attempt: int) -> str:
    """Name of the Indexed Job of one training attempt."""
    return f"{job}-{TRAIN}-{attempt}"


def evaluate_name(job: str) -> str:
    """Name of the evaluation's Job, and of the ConfigMap with its recipe."""
    return f"{job}-{EVALUATE}"


def gate_job_name(promotion: str, digest: str) -> str:
    """Name of the Job of a gate. The digest identifies the promotion, the version and the Job."""
    return _child_job_name(promotion, GATE, digest)


def copy_job_name(promotion: str, digest: str) -> str:
    """Name of the Job of a copy. The digest identifies the promotion, the version to copy and what the copy depends on."""
    return _child_job_name(promotion, COPY, digest)


def _child_job_name(promotion: str, component: str, digest: str) -> str:
    start = promotion[:_MAX_PROMOTION_CHARS].replace(".", "-").rstrip("-")
    return f"{start}-{component}-{digest}"


def default_experiment(namespace: str, *, on_databricks: bool) -> str:
    """Name of the MLflow experiment for the runs of a namespace."""
    return f"/Shared/{namespace}" if on_databricks else namespace


def experiment(namespace: str, tracking: Tracking, *, on_databricks: bool) -> str:
    """Name of the MLflow experiment that contains a job's run. The name never changes: `tracking` is immutable."""
    return tracking.experiment or default_experiment(namespace, on_databricks=on_databricks)


def service_name(job: str) -> str:
    """Name of the headless Service that gives training pods their host names."""
    return job


def network_policy_name(job: str) -> str:
    """Name of the NetworkPolicy of a job whose pods connect to each other."""
    return job


def owner_tag(alias: str) -> str:
    """Name of the tag of a registered model that says which installation of the operator moves an alias."""
    return f"finetune_owner_{alias}"


def promotion_tag(alias: str, fact: str) -> str:
    """Name of a tag of a version that had an alias; several aliases have tags of their own on one version.

    Args:
        fact: `by`, `at`, `from` (the version that the alias pointed at before) or `gates` (digest of the gates that the version passed).
    """
    return f"promoted_{alias}_{fact}"
