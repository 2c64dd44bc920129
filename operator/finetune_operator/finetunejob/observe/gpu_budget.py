"""Limits the GPUs that the jobs of a tenant have at the same time: a job that would exceed maxGpus waits until others have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.batch.state import is_alive
from finetune_operator.controller.reading import UnreadableStatusError
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.model import FINISHED_PHASES, FineTuneJob
from finetune_operator.finetunejob.observe.observer import read_finetunejob
from finetune_operator.policy.status import find_condition, read_condition
from finetune_operator.settings import Settings
from finetune_operator.tenancy.model import Refusal, Tenant
from finetune_operator.tenancy.permissions import Permissions
from finetune_operator.tenancy.templates import count_devices


@dataclass
class GpuBudget:
    """Lets jobs begin in the order of their creation, as long as the GPUs of their tenant suffice.

    A job counts with the stage that has the most GPUs, from when it is accepted until it has finished or is suspended. Beyond that, its pods
    count until they have ended, whatever the job says: it may be refused, or its pods may take long to stop.
    """

    store: Store
    settings: Settings
    permissions: Permissions
    _admitted: set[str] = field(default_factory=set)
    """The uids of jobs that may begin, whose status may not say so yet: passes of other jobs run at the same time."""
    _gpus: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By uid, the generation of a job and its GPUs, since reading a spec takes a millisecond."""

    def refuse(self, ftj: FineTuneJob) -> Refusal | None:
        """Return why a job must wait; None if its GPUs fit. A job whose spec has grown, or that restarts, is checked again."""
        tenant, spec = self.permissions.find_tenant(ftj.namespace), ftj.spec
        if tenant is None or tenant.max_gpus is None or spec is None or ftj.is_finished:
            return None
        gpus = count_gpus(spec)
        body = self.store.finetunejobs.get((ftj.namespace, ftj.name))
        if gpus == 0 or spec.suspend or body is None:
            return None
        pod_gpus = self._count_gpus_of_pods(tenant)
        if pod_gpus[ftj.uid] >= gpus:
            # Its pods run.
            return None
        if gpus > tenant.max_gpus:
            message = (
                f"the job needs {gpus} GPUs, and the jobs of its tenant may have {tenant.max_gpus} at the same time (maxGpus): create a "
                "FineTuneJob with another name and fewer GPUs, or ask the platform team to raise the limit in the values of the chart"
            )
            return Refusal(ConditionReason.NOT_PERMITTED, message)
        used = self._count_used(tenant, body, pod_gpus)
        if used + gpus > tenant.max_gpus:
            message = (
                f"the job needs {gpus} GPUs, and older jobs of its tenant have or wait for {used} of {tenant.max_gpus} (maxGpus): it begins "
                "when enough of them have ended or are suspended"
            )
            return Refusal(ConditionReason.GPU_LIMIT_REACHED, message)
        self._admitted.add(ftj.uid)
        return None

    def forget(self, ftj: FineTuneJob) -> None:
        """Forget a deleted job."""
        self._admitted.discard(ftj.uid)
        self._gpus.pop(ftj.uid, None)

    def settle(self, ftj: FineTuneJob, status: FineTuneJobStatus) -> None:
        """Forget that a job may begin if the pass has not accepted it for another reason, such as a wrong template."""
        accepted = find_condition(status, ConditionType.ACCEPTED)
        if accepted is None or accepted.status != "True":
            self._admitted.discard(ftj.uid)

    def _count_used(self, tenant: Tenant, body: Json, pod_gpus: Mapping[str, int]) -> int:
        """Return the GPUs of the other jobs of a tenant that have begun, of pods, and of older jobs that wait for GPUs.

        Args:
            body: the job that asks. If it has begun, it waits for no other.
            pod_gpus: the GPUs of pods that have not ended, by the uid of their job.
        """
        uid, age, has_begun = body["metadata"]["uid"], _sort_key(body), self._has_begun(body)
        used = Counter({job_uid: gpus for job_uid, gpus in pod_gpus.items() if job_uid != uid})
        for (namespace, _), job in self.store.finetunejobs.items():
            job_uid = job["metadata"]["uid"]
            if job_uid == uid or self.permissions.find_tenant(namespace) is not tenant:
                continue
            waits_before = not has_begun and _waits_for_gpus(job) and _sort_key(job) < age
            if self._has_begun(job) or waits_before:
                used[job_uid] = max(used[job_uid], self._count_gpus_of(job))
        return used.total()

    def _count_gpus_of_pods(self, tenant: Tenant) -> Counter[str]:
        """Return the GPUs of the pods of a tenant that have not ended, by the uid of their job, which may no longer exist."""
        pod_gpus: Counter[str] = Counter()
        for (namespace, _), pod in self.store.of("Pod").items():
            uid = (pod["metadata"].get("labels") or {}).get(names.LABEL_UID)
            if uid and is_alive(pod) and self.permissions.find_tenant(namespace) is tenant:
                pod_gpus[uid] += count_devices(pod)
        return pod_gpus

    def _has_begun(self, body: Json) -> bool:
        """Whether a job may create pods: it was accepted, has not finished, and is neither suspended nor deleted."""
        status, uid = body.get("status") or {}, body["metadata"]["uid"]
        is_over = status.get("phase") in FINISHED_PHASES or "deletionTimestamp" in body["metadata"]
        if is_over or (body.get("spec") or {}).get("suspend"):
            self._admitted.discard(uid)
            return False
        is_accepted = read_condition(body, ConditionType.ACCEPTED)[0] == "True"
        is_suspended = read_condition(body, ConditionType.SUSPENDED)[0] == "True"
        return uid in self._admitted or (is_accepted and not is_suspended)

    def _count_gpus_of(self, body: Json) -> int:
        uid, generation = body["metadata"]["uid"], int(body["metadata"].get("generation", 1))
        cached_generation, gpus = self._gpus.get(uid, (None, 0))
        if cached_generation == generation:
            return gpus
        try:
            spec = read_finetunejob(body, self.settings.defaults).spec
        except UnreadableStatusError:
            spec = None
        gpus = count_gpus(spec) if spec else 0
        self._gpus[uid] = (generation, gpus)
        return gpus


def count_gpus(spec: FineTuneJobSpec) -> int:
    """Return the GPUs of the stage that has the most; 0 for a job with a sweep, whose trials have them."""
    if spec.sweep:
        return 0
    resource, pods = spec.distributed.gpu_resource, spec.pods
    return max(
        spec.distributed.nodes * count_devices(pods.train.template, resource),
        count_devices(pods.prepare.template, resource),
        count_devices(pods.evaluate.template, resource),
    )


def _waits_for_gpus(body: Json) -> bool:
    is_suspended = (body.get("spec") or {}).get("suspend")
    return (
        not is_suspended
        and "deletionTimestamp" not in body["metadata"]
        and read_condition(body, ConditionType.ACCEPTED) == ("False", ConditionReason.GPU_LIMIT_REACHED)
    )


def _sort_key(body: Json) -> tuple[str, str]:
    return str(body["metadata"].get("creationTimestamp")), str(body["metadata"]["uid"])
