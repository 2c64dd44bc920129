"""One pass over one job: observe, decide, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.controller.leases import LeaseBusy
from finetune_operator.controller.reconciler import BUSY_SECONDS, Reconciler, utc_now
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob import deferral, quiet
from finetune_operator.finetunejob.apply import FineTuneJobApplier, NameTaken
from finetune_operator.finetunejob.decide import can_only_stop, decide, decide_deletion
from finetune_operator.finetunejob.decide.action_results import record_results
from finetune_operator.finetunejob.decide.ready import summarize_status
from finetune_operator.finetunejob.decision import CancelRun, Decision
from finetune_operator.finetunejob.external_actions import Applied
from finetune_operator.finetunejob.model import FINISHED_PHASES, FineTuneJob, Observed
from finetune_operator.finetunejob.observe.gpu_budget import GpuBudget
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver, read_finetunejob
from finetune_operator.finetunejob.observe.suggestions import suggest_values
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.kube import KubeError
from finetune_operator.owners import Owner
from finetune_operator.policy.status import with_condition
from finetune_operator.settings import Settings
from finetune_operator.tenancy.model import Refusal
from finetune_operator.tenancy.permissions import Permissions

# A pass that wrote the status is followed by a second pass, which decides from the new status. After this delay, the second pass also
# handles the events of the children that the first pass created.
_SETTLE_SECONDS = 0.3
# While a write is in progress, the earliest next pass that policies may request.
_PENDING_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass
class FineTuneJobReconciler(Reconciler):
    """Handles keys of FineTuneJobs."""

    kind: ClassVar[str] = "FineTuneJob"
    expected: ClassVar[tuple[type[Exception], ...]] = (*Reconciler.expected, NameTaken)

    observer: FineTuneJobObserver
    applier: FineTuneJobApplier
    settings: Settings
    now: Callable[[], datetime] = utc_now
    permissions: Permissions | None = None
    """What the tenants may use; None: everything."""
    gpu_budget: GpuBudget | None = None

    async def reconcile(self, body: Json) -> float | None:
        """Observe, decide and apply. If `decide` requests dry runs or values of trials, it is called again with the answer."""
        ftj = read_finetunejob(body, self.settings.defaults)
        refusal = self._find_refusal(ftj)
        if ftj.deleting:
            return await self._release(ftj, refusal)
        # For `_report`, if the pass fails before it decides.
        decision = Decision(status=ftj.status)
        try:
            observed = await self._observe(ftj, refusal)
            now = self.now()
            decision = decide(ftj, observed, now, self.settings)
            if decision.dry_runs:
                answer = await self.observer.dry_runner.run(ftj, decision.dry_runs)
                observed = replace(observed, dry_run_answer=answer)
                decision = decide(ftj, observed, now, self.settings)
            if decision.suggestions:
                suggestions = await suggest_values(decision.suggestions)
                decision = decide(ftj, replace(observed, suggestions=suggestions), now, self.settings)
            if self.gpu_budget:
                self.gpu_budget.settle(ftj, decision.status)
            return await self._carry_out(ftj, decision, now)
        except LeaseBusy as error:
            log.debug("%s: %s", ftj.key, error)
            return BUSY_SECONDS
        except (KubeError, NameTaken) as error:
            await self._report(ftj, decision, error)
            raise

    def forget(self, ftj: FineTuneJob) -> None:
        """Forget a deleted job."""
        self.applier.forget(ftj)
        if self.gpu_budget:
            self.gpu_budget.forget(ftj)

    def _find_refusal(self, ftj: FineTuneJob) -> Refusal | None:
        """Return why the tenancy does not permit the job, or why it must wait for GPUs."""
        if self.permissions is None:
            return None
        refusal = self.permissions.refuse_job(ftj.namespace, ftj.written, ftj.spec)
        return refusal or (self.gpu_budget.refuse(ftj) if self.gpu_budget else None)

    async def _observe(self, ftj: FineTuneJob, refusal: Refusal | None) -> Observed:
        """Observe everything for a job that is permitted; for another one, at most what its suspension stops."""
        if refusal is None:
            return await self.observer.observe(ftj, self.now())
        if can_only_stop(ftj):
            return replace(await self.observer.observe_suspension(ftj), refusal=refusal)
        # NB: the read itself would send credentials where the author wants them.
        return Observed(refusal=refusal)

    async def _release(self, ftj: FineTuneJob, refusal: Refusal | None) -> float | None:
        """One pass over a job that is being deleted: cancel its Databricks run, then remove the finalizer."""
        if names.RUN_FINALIZER not in ftj.finalizers:
            return None
        if refusal and ftj.status.resolved is None:
            # The job was never accepted, so it has no run, and somebody else has set the finalizer.
            await self.applier.set_finalizer(ftj, is_needed=False)
            return None
        observed = Observed() if ftj.spec is None else await self.observer.observe_deletion(ftj)
        now = self.now()
        decision = decide_deletion(ftj, observed, now, self.settings)
        try:
            delay = await self._carry_out(ftj, decision, now)
        except ExternalError as error:
            if not backends.may_release(ftj, error.problem):
                raise
            log.warning("%s is deleted without checking for a Databricks run: %s", ftj.key, error)
            await self.applier.set_finalizer(ftj, is_needed=False)
            return None
        # Without the finalizer, the job no longer exists.
        return delay if decision.finalizer is None else None

    def find_longest_wait(self, body: Json) -> float:
        """Return the resync interval; for a quiet job at least `quiet.LONGEST_WAIT_SECONDS`."""
        meta, seconds = body["metadata"], self.settings.resync_seconds
        # NB: parsing the spec takes a millisecond, and the phase suffices for most jobs.
        if (body.get("status") or {}).get("phase") not in FINISHED_PHASES:
            return seconds
        ftj, owner = read_finetunejob(body, self.settings.defaults), Owner(meta["namespace"], meta["uid"])
        is_quiet = quiet.is_quiet(ftj, self.store.jobs_of(owner), self.store.pods_of(owner))
        return max(seconds, quiet.LONGEST_WAIT_SECONDS) if is_quiet else seconds

    async def report_internal_error(self, body: Json, message: str) -> None:
        """Report in the status that the job cannot be reconciled; the status of a finished job stays."""
        ftj, now = read_finetunejob(body, self.settings.defaults), self.now()
        if ftj.is_finished:
            return
        kind, reason = ConditionType.ACCEPTED, ConditionReason.INTERNAL_ERROR
        status = with_condition(ftj.status, kind, None, reason, message, now=now, generation=ftj.generation)
        await self.applier.write_status(ftj, Decision(status=summarize_status(ftj, status, now)), now)

    async def _carry_out(self, ftj: FineTuneJob, decision: Decision, now: datetime) -> float | None:
        """Apply a decision, and write the status with the results unless it may wait. Returns the seconds until the next pass.

        They are None if no pass must follow.

        Raises:
            KubeError: the API server refused something, or could not be reached.
            NameTaken: a child's name belongs to another object.
            ExternalError: MLflow or Databricks could not be written to; the status has the error.
            LeaseBusy: another replica writes; retry in about a second.
        """
        applied = await self.applier.apply(ftj, decision, now)
        decision = record_results(ftj, decision, applied.results, self.settings, now=now)
        delay = deferral.find_delay(ftj.status, decision, applied.results)
        if delay is not None and not applied.failure:
            return _find_requeue(decision, applied, delay)
        wrote_status = await self.applier.write_status(ftj, decision, now)
        if applied.failure:
            raise applied.failure
        if decision.finalizer is not None:
            await self.applier.set_finalizer(ftj, is_needed=decision.finalizer)
        if _must_read_back(decision, applied):
            return 0.0
        return _find_requeue(decision, applied, _SETTLE_SECONDS if wrote_status else None)

    async def _report(self, ftj: FineTuneJob, decision: Decision, error: KubeError | NameTaken) -> None:
        """Report in the status why the children cannot be created; any other error of the API server is only raised."""
        if isinstance(error, NameTaken):
            kind, reason = ConditionType.PODS_HEALTHY, ConditionReason.NAME_TAKEN
        elif error.status == 403:
            kind, reason = ConditionType.PODS_HEALTHY, ConditionReason.POD_REJECTED
        elif error.status in (422, 400):
            kind, reason = ConditionType.PODS_HEALTHY, ConditionReason.POD_TEMPLATE_INVALID
        else:
            return
        now = self.now()
        status = with_condition(
            _status_without_children(ftj, decision),
            kind,
            False,
            reason,
            str(error),
            now=now,
            generation=ftj.generation,
        )
        try:
            await self.applier.write_status(ftj, Decision(status=summarize_status(ftj, status, now)), now)
        except KubeError as status_error:
            log.warning("%s: failed to write the status: %s", ftj.key, status_error)


def _find_requeue(decision: Decision, applied: Applied, delay: float | None) -> float | None:
    """The seconds until the next pass; None if no pass must follow.

    Args:
        delay: the seconds until the pass that must follow the status or the children; None if none must.
    """
    planned = decision.requeue_seconds
    if planned is not None and any(result.pending_seconds is not None for result in applied.results):
        # The end of the write queues a pass: until then, a pass would decide the same.
        planned = max(planned, _PENDING_SECONDS)
    return min((seconds for seconds in (delay, planned) if seconds is not None), default=None)


def _must_read_back(decision: Decision, applied: Applied) -> bool:
    """Whether the next pass must read at once what a pass has written."""
    # NB: the API server's response to a changed finalizer or a scaled Job may include changes by other clients. The store then has these
    # changes before their events arrive, so these events cause no pass.
    has_patched = decision.finalizer is not None or bool(decision.scaled)
    # A write to MLflow or Databricks that is over, except for a canceled run, whose end takes a while.
    has_written = any(
        not isinstance(result.action, CancelRun) and result.pending_seconds is None
        for result in applied.results
    )
    return has_patched or has_written


def _status_without_children(ftj: FineTuneJob, decision: Decision) -> FineTuneJobStatus:
    """The status of a pass whose children could not be created: the one before the pass, unless the job was resumed.

    NB: a job that was resumed must not stay Suspended because its next pods are rejected. No pods were created, so the start time stays.
    """
    after = decision.status
    is_resumed = ftj.status.suspend_time is not None and after.suspend_time is None
    return after.model_copy(update={"start_time": ftj.status.start_time}) if is_resumed else ftj.status
