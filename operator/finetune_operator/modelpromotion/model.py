"""The data of a pass over a ModelPromotion: the resource, the observation and the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import ModelVersion, MoveAlias, RegisteredModel
from finetune_operator.registry.ownership import UNSUPPORTED, Ownership
from finetune_operator.serving.model import Endpoint, EndpointAction, ServingBackend
from finetune_operator.tenancy.model import Refusal


@dataclass(frozen=True)
class Promotion:
    """A ModelPromotion as the API server has it.

    `spec` is None when it does not fit this version's schema; `invalid` then has the reason. `version` is the resource version.
    `editor` is the field manager that last changed the spec, and `edited` the time of that change. `backend` is the serving
    backend; None without spec.serving.
    """

    name: str
    namespace: str
    uid: str
    version: str
    generation: int
    created: datetime
    spec: ModelPromotionSpec | None
    status: ModelPromotionStatus
    invalid: str | None = None
    editor: str = "unknown"
    edited: datetime | None = None
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    backend: ServingBackend | None = None

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class SourceJob:
    """The FineTuneJob that the source names: its phase, and the version that it registered.

    `elsewhere` is the job's registry if it differs from the promotion's; then `version` is None.
    """

    phase: str = "Pending"
    model: str | None = None
    version: str | None = None
    elsewhere: str | None = None


@dataclass(frozen=True)
class ObservedJob:
    """A Job of a gate or of a copy.

    Attributes:
        body: the Job, without the template of its pods.
        pods: its pods. Of a Job that has ended, they are read from the API server, and may no longer exist.
        run: its MLflow run, which is read once the Job has ended; None if it has none, or if somebody deleted it.
        rejection: the API server's last refusal to create its pods.
    """

    body: Json
    pods: tuple[Json, ...] = ()
    run: Run | None = None
    rejection: str | None = None

    @property
    def name(self) -> str:
        """The name of the Job."""
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The uid of the Job."""
        return str(self.body["metadata"]["uid"])

    @property
    def component(self) -> str:
        """Whether it is the Job of a gate or of a copy: names.GATE or names.COPY."""
        return find_component(self.body)

    @property
    def run_id(self) -> str | None:
        """The id of its MLflow run; None if it has none."""
        return find_run_id(self.body)

    @property
    def is_released(self) -> bool:
        """Whether Kubernetes deletes it some time after its end, see `ReleaseJob`."""
        return "ttlSecondsAfterFinished" in self.body["spec"]


def find_component(job: Json) -> str:
    """Whether a Job of a promotion is that of a gate or of a copy: names.GATE or names.COPY."""
    return str((job["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT, names.GATE))


def find_run_id(job: Json) -> str | None:
    """The id of the MLflow run of a promotion's Job; None if it has none."""
    return (job["metadata"].get("annotations") or {}).get(names.ANNOTATION_RUN)


@dataclass(frozen=True)
class SourceVersion:
    """The version of another registry that the source names, and its copy.

    Attributes:
        number: the version there; None if the alias, the model or the version does not exist, or while `problem` is set.
        digest: identity of the version: its address, number, run and creation time; empty without a number.
        is_ready: whether the files of the version are complete.
        copy: the version that is its copy; None if there is none.
        problem: why the other registry cannot be read.
    """

    number: str | None = None
    digest: str = ""
    is_ready: bool = True
    copy: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Reading:
    """The number of spec.onRegression; None if it could not be read, and `problem` says why."""

    value: float | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Observed:
    """The observed state of a promotion.

    Attributes:
        problem: why the registry could not be read; then `model` and `versions` are not known.
        model: the registered model; None if it does not exist.
        versions: the versions that were read, by number; None for a version that does not exist.
        job: the FineTuneJob that the source names; None if it does not exist.
        source_version: the version of another registry that the source names; None for a source of another type.
        rival: namespace/name of an older ModelPromotion for the same alias.
        loop: a message about a cycle of aliases that take their version from each other, if this promotion's alias is in one.
        endpoint: the serving endpoint; None if it was not read.
        child_jobs: its Jobs that exist, of gates and of copies, for whichever version.
        ownership: which installation moves the alias.
        reading: the number of spec.onRegression; None if no version is watched.
        refusal: why the promotion must not be reconciled; then nothing else was observed.
        needed_approvals: the number of people who must approve a version, by the platform team's file; 0 if it does not say.
    """

    problem: Problem | None = None
    model: RegisteredModel | None = None
    versions: Mapping[str, ModelVersion | None] = field(default_factory=dict)
    job: SourceJob | None = None
    source_version: SourceVersion | None = None
    rival: str | None = None
    loop: str | None = None
    endpoint: Endpoint | None = None
    child_jobs: tuple[ObservedJob, ...] = ()
    ownership: Ownership = UNSUPPORTED
    reading: Reading | None = None
    refusal: Refusal | None = None
    needed_approvals: int = 0

    def alias(self, name: str) -> str | None:
        """The version that an alias points at."""
        return self.model.holder(name) if self.model else None

    def lacks(self, version: str | None) -> bool:
        """Whether the version was read and does not exist."""
        return version is not None and version in self.versions and self.versions[version] is None


@dataclass(frozen=True)
class JobRun:
    """The MLflow run of a promotion's Job. It is found by the tag `tag` with the value `key`, and created if it does not exist."""

    tag: str
    key: str
    experiment: str
    name: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class StartJob:
    """Create a Job, after its MLflow run; `run` is None without an MLflow server."""

    body: Json
    run: JobRun | None

    @property
    def component(self) -> str:
        """Whether it is the Job of a gate or of a copy: names.GATE or names.COPY."""
        return find_component(self.body)


@dataclass(frozen=True)
class StopJob:
    """Delete a Job with its pods, and close its MLflow run (None if it has none)."""

    name: str
    uid: str
    run_id: str | None


@dataclass(frozen=True)
class ReleaseJob:
    """Let Kubernetes delete a Job some time after its end. Its result is in the status, or is not needed."""

    name: str
    uid: str


@dataclass(frozen=True)
class CloseRun:
    """Close the MLflow run of a Job that has ended. `status`: FINISHED or FAILED."""

    run_id: str
    status: str
    component: str


@dataclass(frozen=True)
class ClaimAlias:
    """Record in the registry that this installation moves the alias. `is_new`: whether it did not before."""

    is_new: bool


JobAction = StartJob | StopJob | ReleaseJob | CloseRun
PromotionAction = MoveAlias | ClaimAlias | EndpointAction | JobAction


def sets_only_tags(action: PromotionAction) -> bool:
    """Whether an action sets tags of a version that already has the alias."""
    return isinstance(action, MoveAlias) and action.expected == action.to


@dataclass(frozen=True)
class PromotionDecision:
    """The new status, and the actions to take.

    Attributes:
        finalizer: whether the resource must have the operator's finalizer; None to leave it unchanged.
        requeue_seconds: when to reconcile again without an event; None for the longest wait.
    """

    status: ModelPromotionStatus
    actions: tuple[PromotionAction, ...] = ()
    finalizer: bool | None = None
    requeue_seconds: float | None = None
