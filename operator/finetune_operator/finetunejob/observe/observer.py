"""Observes the state of a FineTuneJob in the cache of the watches, the API server, MLflow, Databricks, Kueue and Git."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.batch.state import is_alive
from finetune_operator.controller.reading import read_spec, read_status
from finetune_operator.controller.store import Store
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.children import is_lost
from finetune_operator.finetunejob.draft import device
from finetune_operator.finetunejob.model import FineTuneJob, Observed, ResumedJob
from finetune_operator.finetunejob.observe.alias_versions import AliasVersionReader
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.child_cache import ChildCache
from finetune_operator.finetunejob.observe.custom_children import CustomChildReader
from finetune_operator.finetunejob.observe.databricks_preparations import PreparationReader
from finetune_operator.finetunejob.observe.dry_run import DryRunner
from finetune_operator.finetunejob.observe.git_revisions import RevisionReader
from finetune_operator.finetunejob.observe.kueue_workloads import WorkloadReader
from finetune_operator.finetunejob.observe.nodes import NodeReader
from finetune_operator.finetunejob.observe.pod_events import PodEventReader
from finetune_operator.finetunejob.observe.preparation_leases import PreparationLeases
from finetune_operator.finetunejob.observe.promoted_aliases import promoted_aliases
from finetune_operator.finetunejob.observe.rejections import read_rejections
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.observe.spark_executors import ExecutorReader
from finetune_operator.finetunejob.observe.trial_evaluations import TrialEvaluationReader
from finetune_operator.finetunejob.preparation import backends, sibling
from finetune_operator.finetunejob.references import resumed_job_name
from finetune_operator.finetunejob.resolve import pinned, resolve
from finetune_operator.kube import Kube
from finetune_operator.owners import find_finetunejob
from finetune_operator.settings import Settings


def read_finetunejob(body: Json, defaults: Defaults) -> FineTuneJob:
    """A FineTuneJob from its JSON, with the defaults of the chart. If the spec does not fit the schema, `invalid` has the reason.

    Raises:
        UnreadableStatusError: a newer version of the operator wrote the status.
    """
    meta = body["metadata"]
    written, invalid = read_spec(FineTuneJobSpec, body)
    status = read_status(FineTuneJobStatus, body, "job")
    spec = None
    if written:
        name, namespace, resolved = meta["name"], meta["namespace"], status.resolved
        spec = resolve(written, namespace=namespace, name=name, earlier=resolved, defaults=defaults)
        spec = pinned(spec, status.pinned)
    return FineTuneJob(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        generation=int(meta.get("generation", 1)),
        spec=spec,
        status=status,
        written=written,
        invalid=invalid,
        finalizers=tuple(meta.get("finalizers") or ()),
        deleting="deletionTimestamp" in meta,
        created=datetime.fromisoformat(meta["creationTimestamp"]) if "creationTimestamp" in meta else None,
        trained_data=(meta.get("annotations") or {}).get(names.ANNOTATION_TRAINED_DATA),
        sweep=find_finetunejob(body),
    )


@dataclass
class FineTuneJobObserver:
    """Observes one FineTuneJob at a time.

    Attributes:
        pace: pace of the background reads of MLflow, Databricks, Kueue and Git.
    """

    kube: Kube
    store: Store
    settings: Settings
    pace: ReadPace
    cache: ChildCache = field(init=False)
    poller: RunPoller = field(init=False)
    run_creator: RunCreator = field(init=False)
    preparations: PreparationReader = field(init=False)
    dry_runner: DryRunner = field(init=False)
    leases: PreparationLeases = field(init=False)

    def __post_init__(self) -> None:
        clock = self.pace.clock
        self._nodes = NodeReader(self.kube, clock)
        self._pod_events = PodEventReader(self.kube, clock)
        self._workloads = WorkloadReader(self.kube, self.pace)
        self._executors = ExecutorReader(self.kube, self.settings)
        self._custom_children = CustomChildReader(self.kube)
        self._revisions = RevisionReader(self.kube, self.pace)
        self.cache = ChildCache(self.kube, self.store)
        self.poller = RunPoller(self.kube, self.settings, self.pace)
        self.run_creator = RunCreator(self.poller, self.store, clock)
        self._alias_versions = AliasVersionReader(self.poller, self.settings, self.pace)
        self._evaluations = TrialEvaluationReader(self.poller, self.settings, self.pace)
        self.preparations = PreparationReader(self.kube, self.settings, self.pace)
        self.dry_runner = DryRunner(self.kube, clock)
        self.leases = PreparationLeases(self.kube, self.store)

    async def observe(self, ftj: FineTuneJob, now: datetime) -> Observed:
        """Observe everything that `decide` needs.

        Raises:
            KubeError: the API server could not be read.
            UnreadableStatusError: a newer version of the operator wrote the status of the job that this job resumes.
        """
        if ftj.spec and ftj.spec.sweep:
            return await self._observe_sweep(ftj)
        jobs, pods = await self.cache.jobs_and_pods(ftj)
        mlflow = await self.poller.poll(ftj, has_pods=any(map(is_alive, pods)))
        rejections = await read_rejections(self.kube, ftj, jobs, pods, now)
        custom_children = await self._custom_children.read(ftj)
        drivers = custom_children.pods if custom_children else ()
        executors = await self._executors.read(ftj, [*pods, *drivers], now)
        if executors.refusal:
            # Executors have no Job of their own: `report_executors` looks for their rejection under the preparation's name.
            rejections[names.prep_name(ftj.name)] = executors.refusal
        # Nothing is reported about the waiting pods of a finished job, so their Events and nodes are not read.
        reported_pods = () if ftj.is_finished else (*pods, *drivers, *executors.pods)
        alive = [pod for pod in reported_pods if is_alive(pod)]
        return Observed(
            jobs=jobs,
            pods=(*pods, *self.cache.failed_pods(ftj)),
            companions=self.cache.companions(ftj),
            mlflow=mlflow,
            rejections=rejections,
            promoted_aliases=promoted_aliases(self.store, self.settings, ftj),
            pod_events=await self._pod_events.read(ftj, alive, now),
            queue_state=await self._workloads.read(ftj, jobs, now),
            node_labels=await self._nodes.read(alive, device.configured_resource(ftj)),
            executors=executors.pods,
            offered_resources=await self._nodes.offered_resources(alive, device.configured_resource(ftj)),
            preparation=await self.preparations.read(ftj),
            custom_children=custom_children,
            lease=await self.leases.read(ftj, jobs),
            prepared_trial=self._find_prepared_trial(ftj, jobs),
            resumed=await self._read_resumed_job(ftj, now),
            alias_versions=await self._alias_versions.read(ftj),
            code=await self._revisions.read(ftj),
            has_checked_pods=self.dry_runner.has_checked(ftj),
        )

    async def _observe_sweep(self, ftj: FineTuneJob) -> Observed:
        """Observe what `decide` needs of a job with a sweep, which has no pods: its FineTuneJobs have them."""
        children = self._find_trials(ftj)
        return Observed(
            mlflow=await self.poller.poll(ftj, has_pods=False),
            alias_versions=await self._alias_versions.read(ftj),
            has_checked_pods=self.dry_runner.has_checked(ftj),
            children=children,
            evaluations=await self._evaluations.read(ftj, children),
        )

    def _find_trials(self, ftj: FineTuneJob) -> dict[str, Json]:
        """The FineTuneJobs of a job with a sweep, by name."""
        bodies = self.store.finetunejobs_of((ftj.namespace, ftj.uid))
        return {body["metadata"]["name"]: body for body in bodies}

    def _find_prepared_trial(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> Json | None:
        """The trial whose table a trial can use that is about to prepare; None for any other job."""
        body = self.store.finetunejobs.get((ftj.namespace, ftj.name))
        if ftj.sweep is None or body is None or not backends.has_to_prepare(ftj, jobs):
            return None
        return sibling.find_prepared_trial(body, self.store.finetunejobs_of(ftj.sweep))

    async def _read_resumed_job(self, ftj: FineTuneJob, now: datetime) -> ResumedJob | None:
        """The job whose checkpoints this job waits for; an empty ResumedJob if it does not exist; None if this job does not wait.

        NB: the other job is read from the API server, since its status in the cache may be outdated.
        """
        name = resumed_job_name(ftj)
        if name is None:
            return None
        body = await self.kube.get("FineTuneJob", ftj.namespace, name)
        if body is None:
            return ResumedJob()
        job = read_finetunejob(body, self.settings.defaults)
        _jobs, pods = await self.cache.jobs_and_pods(job)
        return ResumedJob(job, sum(is_alive(pod) and not is_lost(pod, now) for pod in pods))

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard everything that was read about a deleted job."""
        self.poller.forget(ftj)
        self.preparations.forget(ftj)
        self.dry_runner.forget(ftj)
        self._revisions.forget(ftj)
        self._alias_versions.forget(ftj)
        self._evaluations.forget(ftj)
        self._workloads.forget(ftj)

    async def observe_suspension(self, ftj: FineTuneJob) -> Observed:
        """Observe what the suspension of a job stops.

        Raises:
            KubeError: the API server could not be read.
        """
        if ftj.spec and ftj.spec.sweep:
            return Observed(children=self._find_trials(ftj))
        jobs, pods = await self.cache.jobs_and_pods(ftj)
        return Observed(
            jobs=jobs,
            pods=tuple(pods),
            preparation=await self.preparations.read(ftj),
            custom_children=await self._custom_children.read(ftj),
        )

    async def observe_deletion(self, ftj: FineTuneJob) -> Observed:
        """Observe the state that `decide_deletion` requires.

        Raises:
            KubeError: the API server could not be read.
        """
        return Observed(preparation=await self.preparations.read(ftj))
