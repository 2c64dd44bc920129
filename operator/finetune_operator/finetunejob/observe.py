"""observe: what exists of a job, from the store, the API server and MLflow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec, Tracking
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names, secrets
from finetune_operator.controller.reading import read_spec, read_status
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.children import Owner, is_leaving, job_ended, of_job
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow, Observed
from finetune_operator.kube import Kube, KubeError
from finetune_operator.mlflow.host import Credentials, canonical
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.choose import registry_of
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

# How long a child Job may lack pods before the API server is asked why.
_POD_PATIENCE = timedelta(seconds=5)


def read_finetunejob(body: Json) -> FineTuneJob:
    """A FineTuneJob from its JSON; a spec that does not fit the schema is noted, never raised.

    Raises:
        UnreadableStatusError: a newer version of the operator wrote the status.
    """
    meta = body["metadata"]
    spec, invalid = read_spec(FineTuneJobSpec, body)
    status = read_status(FineTuneJobStatus, body, "job")
    return FineTuneJob(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        generation=int(meta.get("generation", 1)),
        spec=spec,
        status=status,
        invalid=invalid,
    )


@dataclass
class FineTuneJobObserver:
    """Looks at the world on behalf of one job at a time."""

    kube: Kube
    store: Store
    settings: Settings
    clock: Callable[[], float]
    _asked: dict[str, tuple[float, object, Mlflow | None]] = field(default_factory=dict)
    _down: dict[str, tuple[float, Problem]] = field(default_factory=dict)

    async def observe(self, job: FineTuneJob, now: datetime) -> Observed:
        """Everything `decide` needs to know.

        Raises:
            KubeError: the API server could not be asked.
        """
        mlflow = await self._mlflow(job)
        await self._read_ends(job)
        owner = Owner(job.namespace, job.uid)
        jobs = {item["metadata"]["name"]: item for item in self.store.jobs_of(owner)}
        live = tuple(self.store.pods_of(owner))
        rejections = await self._rejections(job, jobs, live, now)
        pods = (*live, *self.store.tombstones(owner))
        return Observed(jobs=jobs, pods=pods, mlflow=mlflow, rejections=rejections, owned=self._owned(job))

    def forget(self, job: FineTuneJob) -> None:
        """MLflow was written to, or the job is gone: what was known of it no longer counts."""
        self._asked.pop(job.uid, None)

    async def server(self, job: FineTuneJob) -> Server | None:
        """The MLflow server of a job, with its credentials; None when it has none.

        Raises:
            ExternalError: the Secret with the credentials is missing.
        """
        tracking = job.spec.tracking if job.spec else None
        uri, registry = self.settings.servers(tracking or Tracking())
        if not uri:
            return None
        reference = tracking.secret_ref if tracking else None
        secret = await secrets.read(self.kube, job.namespace, reference, secrets.TRACKING)
        return Server(uri, registry, Credentials.of(secret))

    async def _read_ends(self, job: FineTuneJob) -> None:
        """List the pods of a child Job whose end is still to be judged.

        NB: two watches deliver Jobs and pods, and the end of a Job may arrive before the ends of its pods: its
        result would seem lost, and its failure without a cause.
        """
        for child in self.store.jobs_of(Owner(job.namespace, job.uid)):
            if job_ended(child) and _is_unread(job, child["metadata"]["name"]):
                selector = f"batch.kubernetes.io/controller-uid={child['metadata']['uid']}"
                for body in (await self.kube.list("Pod", job.namespace, labelSelector=selector)).objects:
                    self.store.put("Pod", body)

    def _owned(self, job: FineTuneJob) -> dict[str, str]:
        """The ModelPromotions that keep aliases of the job's model in the same registry, by alias."""
        # NB: one that is refused, or that never got at the registry, keeps nothing: its alias would stay as it is.
        if job.spec is None or job.spec.register_ is None:
            return {}
        registry = canonical(self.settings.servers(job.spec.tracking)[1])
        found: dict[str, str] = {}
        for (namespace, name), body in sorted(self.store.promotions.items()):
            spec = body.get("spec") or {}
            status = body.get("status") or {}
            said = {item["type"]: item["status"] for item in status.get("conditions") or ()}
            reached = said.get(ConditionType.REGISTRY_READY) == "True" or status.get("promoted") is not None
            if (
                "deletionTimestamp" not in body["metadata"]
                and spec.get("model") == job.spec.register_.model
                and registry_of(self.settings, spec.get("tracking") or {}) == registry
                and said.get(ConditionType.ACCEPTED) == "True"
                and reached
            ):
                found.setdefault(str(spec.get("alias")), f"{namespace}/{name}")
        return found

    async def _mlflow(self, job: FineTuneJob) -> Mlflow | None:
        question = self._question(job)
        if question is None:
            self.forget(job)
            return None
        now = self.clock()
        held = self._asked.get(job.uid)
        if held and held[1] == question and now - held[0] < self.settings.poll_seconds * 0.8:
            return held[2]
        answer = await self._ask(job, want_version=question[1])
        self._asked[job.uid] = (now, question, answer)
        return answer

    def _question(self, job: FineTuneJob) -> tuple[str | None, bool] | None:
        """What MLflow is to be asked: the run by this id, and whether for the version too. None: nothing."""
        closed = any(
            item.type == ConditionType.TRACKED and item.reason == ConditionReason.RUN_FINISHED
            for item in job.status.conditions
        )
        run_id = job.status.mlflow.run_id if job.status.mlflow else None
        if job.spec is None or (_is_finished(job) and (run_id is None or closed)):
            return None
        unregistered = _holds(job, ConditionType.TRAINED) and not _holds(job, ConditionType.REGISTERED)
        return run_id, unregistered and job.spec.register_ is not None

    async def _ask(self, job: FineTuneJob, *, want_version: bool) -> Mlflow | None:
        try:
            server = await self.server(job)
        except ExternalError as error:
            return Mlflow(problem=error.problem)
        if server is None:
            return None
        down = self._down.get(server.uri)
        if down and self.clock() < down[0]:
            return Mlflow(problem=down[1])
        answer = await asyncio.to_thread(_ask, server, job, want_version)
        self._down.pop(server.uri, None)
        if answer.problem and answer.problem.reason == ConditionReason.MLFLOW_UNREACHABLE:
            # Other jobs need not wait for the same time-out.
            self._down[server.uri] = (self.clock() + self.settings.poll_seconds, answer.problem)
        return answer

    async def _rejections(
        self, job: FineTuneJob, jobs: dict[str, Json], pods: tuple[Json, ...], now: datetime
    ) -> dict[str, str]:
        """Why the API server refuses to create pods (quota, Pod Security): only Events tell."""
        found: dict[str, str] = {}
        for name, child in jobs.items():
            meta, spec = child["metadata"], child["spec"]
            patient = now - datetime.fromisoformat(meta["creationTimestamp"]) < _POD_PATIENCE
            if (
                patient
                or is_leaving(child)
                or spec.get("suspend")
                or job_ended(child)
                or len(of_job(pods, child)) >= spec["parallelism"]
            ):
                continue
            selector = f"involvedObject.uid={meta['uid']},reason=FailedCreate"
            try:
                events = await self.kube.list("Event", job.namespace, fieldSelector=selector)
            except KubeError as error:
                log.warning("%s: why it lacks pods is not known, Events cannot be listed: %s", job.key, error)
                continue
            if events.objects:
                last = max(events.objects, key=lambda event: event.get("lastTimestamp") or "")
                found[name] = f"pods of Job {name} cannot be created: {last.get('message', '')}"
        return found


def _holds(job: FineTuneJob, kind: ConditionType) -> bool:
    return any(item.type == kind and item.status == "True" for item in job.status.conditions)


def _is_finished(job: FineTuneJob) -> bool:
    return _holds(job, ConditionType.SUCCEEDED) or _holds(job, ConditionType.FAILED)


def _is_unread(job: FineTuneJob, child: str) -> bool:
    """Whether a child's end was not yet written into the status."""
    if _is_finished(job):
        return False
    if child == names.prep_name(job.name):
        return not _holds(job, ConditionType.PREPARED)
    return child == names.train_name(job.name, job.status.attempt or 1) and not _holds(
        job, ConditionType.TRAINED
    )


def _ask(server: Server, job: FineTuneJob, want_version: bool) -> Mlflow:
    known = job.status.mlflow.run_id if job.status.mlflow else None
    if job.spec is None:
        return Mlflow()
    try:
        run = server.find_run(job.uid, names.experiment(job.namespace, job.spec.tracking), known)
        version = None
        if run and want_version and job.spec.register_:
            wanted = job.spec.register_
            registry = MlflowRegistry.of(server)
            version = registry.find_version(wanted.model, run.run_id, wanted.aliases)
        return Mlflow(run=run, version=version)
    except ExternalError as error:
        return Mlflow(problem=error.problem)
