"""Start the operator: `finetune-operator`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import kopf
import prometheus_client

from finetune_crds.base import Json
from finetune_operator import metrics
from finetune_operator.controller.election import (
    Election,
    LeaseLostError,
    build_identity,
    request_timeout,
)
from finetune_operator.controller.health import Health, serve_probes
from finetune_operator.controller.leases import Leases
from finetune_operator.controller.optional_kinds import turn_off_forbidden_kinds
from finetune_operator.controller.reading import UnreadableStatusError
from finetune_operator.controller.reconciler import utc_now
from finetune_operator.controller.resync import Resync
from finetune_operator.controller.store import Store
from finetune_operator.controller.watch_errors import restart_failed_watches
from finetune_operator.controller.watch_parsing import parse_deep_objects
from finetune_operator.controller.watches import Handlers, build_registry
from finetune_operator.controller.workqueue import Queues, WorkQueue, work
from finetune_operator.fence import PROCESS_FENCE, EventLoop, Fence, seconds_since_boot
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob import enqueue as finetunejob_events
from finetune_operator.finetunejob.abandoned_runs import AbandonedRuns, close_run_of_deleted
from finetune_operator.finetunejob.apply import FineTuneJobApplier
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.gpu_budget import GpuBudget
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver, read_finetunejob
from finetune_operator.finetunejob.reconcile import FineTuneJobReconciler
from finetune_operator.finetuneschedule import enqueue as schedule_events
from finetune_operator.finetuneschedule.apply import FineTuneScheduleApplier
from finetune_operator.finetuneschedule.observe import FineTuneScheduleObserver
from finetune_operator.finetuneschedule.reconcile import FineTuneScheduleReconciler
from finetune_operator.gauges import Gauges
from finetune_operator.installation_files import InstallationFileError
from finetune_operator.kube import Kube, NoClusterError
from finetune_operator.log_setup import configure_logging
from finetune_operator.modelpromotion import enqueue as promotion_events
from finetune_operator.modelpromotion.apply import ModelPromotionApplier
from finetune_operator.modelpromotion.notices import list_notices
from finetune_operator.modelpromotion.observe import ModelPromotionObserver, read_promotion
from finetune_operator.modelpromotion.reconcile import ModelPromotionReconciler
from finetune_operator.notifications.model import Notice, Webhook, load_webhooks
from finetune_operator.notifications.sender import REPEAT_SECONDS, Sender
from finetune_operator.owners import find_owner
from finetune_operator.registry.alias_owners import AliasOwners
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings, SettingsError
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.permissions import Permissions

log = logging.getLogger("finetune_operator")

_THREADS_PER_WORKER = 3
# At the end of the process: how long the passes in progress may still take, before this replica releases its Lease.
_STOP_SECONDS = 2.0


def main() -> int:
    """Run until stopped; the exit code is 64 when the configuration is wrong, and 1 when another replica may lead or a part has failed."""
    try:
        settings = Settings.from_command_line(sys.argv[1:])
        tenancy_file = TenancyFile(settings.tenancy_file)
        tenancy_file.read()
        webhooks = load_webhooks(settings.webhooks_file)
    except (SettingsError, InstallationFileError) as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 64
    configure_logging(settings)
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(run(settings, tenancy_file, webhooks))
    except NoClusterError as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 64
    except LeaseLostError as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        return 1
    return 0


async def run(settings: Settings, tenancy_file: TenancyFile, webhooks: Sequence[Webhook] = ()) -> None:
    """Run until SIGTERM, or until a part of the operator fails.

    Raises:
        LeaseLostError: another replica may lead.
        Exception: the error of the part that failed.
    """
    # NB: the Lease has a client of its own, with an open fence. The process's fence would refuse requests for the Lease before this
    # replica leads, and these requests must not wait behind other requests.
    async with Kube() as kube, Kube(Fence(), request_timeout(settings.lease_seconds)) as lease_kube:
        # NB: a request to MLflow or Databricks blocks its thread, and a slow server must not delay requests to other servers: reads of
        # FineTuneJobs, writes of FineTuneJobs and the workers of ModelPromotions have as many threads each.
        threads = _THREADS_PER_WORKER * settings.workers
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads, "client"))
        settings = await turn_off_forbidden_kinds(kube, settings)
        operator = Operator.of(kube, lease_kube, settings, tenancy_file, webhooks)
        _measure(operator.queues)
        if settings.metrics_port:
            prometheus_client.start_http_server(settings.metrics_port)
        log.info("watching %s", ", ".join(settings.namespaces) or "all namespaces")
        await operator.run()


@dataclass(frozen=True)
class Operator:
    """The parts of the operator, connected."""

    settings: Settings
    store: Store
    queues: Queues
    election: Election
    health: Health
    resync: Resync
    deleted_jobs: asyncio.Queue[Json]
    """FineTuneJobs that were deleted while no watch ran, in their last known state."""
    observer: FineTuneJobObserver
    finetunejobs: FineTuneJobReconciler
    promotions: ModelPromotionReconciler
    schedules: FineTuneScheduleReconciler
    permissions: Permissions
    sender: Sender
    abandoned_runs: AbandonedRuns
    gauges: Gauges
    terminated: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(
        cls,
        kube: Kube,
        lease_kube: Kube,
        settings: Settings,
        tenancy_file: TenancyFile,
        webhooks: Sequence[Webhook] = (),
    ) -> Operator:
        """Create the parts and connect them.

        Args:
            lease_kube: the client for the Lease of the leader alone.
        """
        store = Store(find_owner, children.recorded_jobs)
        queues = Queues(*(WorkQueue(time.monotonic, settings.workers, is_open=False) for _ in range(3)))
        process = uuid.uuid4().hex[:8]
        election = _create_election(lease_kube, settings, process)
        health = Health(queues, settings.resync_seconds, election.why_unready)
        observer = FineTuneJobObserver(
            kube, store, settings, ReadPace.of(settings, time.monotonic, queues.finetunejobs.add)
        )
        writer = AliasWriter(
            kube, settings, identity=f"{socket.gethostname()}-{process}", clock=seconds_since_boot
        )
        namespaces = NamespaceReader(kube, time.monotonic)
        applier = FineTuneJobApplier.of(observer, writer, namespaces)
        permissions = Permissions(settings, tenancy_file)
        sender = Sender(webhooks, time.monotonic)
        finetunejobs = FineTuneJobReconciler(
            store,
            queues.finetunejobs,
            observer,
            applier,
            settings,
            permissions=permissions,
            gpu_budget=GpuBudget(store, settings, permissions),
        )
        deleted_jobs: asyncio.Queue[Json] = asyncio.Queue()
        promotions = _create_promotion_reconciler(
            kube, store, queues, permissions, writer, announce=sender.announce
        )
        return cls(
            settings=settings,
            store=store,
            queues=queues,
            election=election,
            health=health,
            resync=Resync(kube, store, queues, settings, health, deleted_jobs.put_nowait),
            deleted_jobs=deleted_jobs,
            observer=observer,
            finetunejobs=finetunejobs,
            promotions=promotions,
            schedules=FineTuneScheduleReconciler(
                store,
                queues.schedules,
                FineTuneScheduleObserver(kube, store, permissions),
                FineTuneScheduleApplier(kube, store, queues.finetunejobs.add),
                settings,
            ),
            permissions=permissions,
            sender=sender,
            abandoned_runs=AbandonedRuns(kube, store, settings, namespaces),
            gauges=Gauges(store, settings.resync_seconds, utc_now),
        )

    async def run(self) -> None:
        """Watch and resync; as the leader, work too. The first part that ends stops the others."""
        async with serve_probes(self.health, self.settings.liveness):
            await self._run_parts()

    async def _run_parts(self) -> None:
        """Run the watches, the resync, the election and the workers until one of them ends, and then stop the others."""
        stop_watching = asyncio.Event()
        watching = asyncio.create_task(self._watch(stop_watching))
        parts = {
            watching,
            asyncio.create_task(self.resync.run()),
            asyncio.create_task(self._forget_vanished()),
            asyncio.create_task(self.election.run()),
            asyncio.create_task(self._work()),
            asyncio.create_task(self.terminated.wait()),
        }
        if self.settings.tenancy_file:
            parts.add(asyncio.create_task(self.permissions.file.follow(self.resync.queue_all)))
        # A part that ends before SIGTERM has failed; the last part only waits for SIGTERM.
        ended, running = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        await self._finish_passes()
        # NB: the watches end last. When they end, kopf waits up to five seconds for all tasks that were created after its own, such as the
        # workers; by then, those tasks have ended.
        for part in running - {watching}:
            part.cancel()
        await asyncio.gather(*running - {watching}, return_exceptions=True)
        await self.election.resign()
        stop_watching.set()
        await asyncio.gather(watching, return_exceptions=True)
        # Raises the error of a part that failed.
        for part in ended:
            part.result()

    async def _finish_passes(self) -> None:
        """Start no more passes, and wait a moment for the passes in progress."""
        self.queues.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self.queues.wait_until_idle()

    async def _watch(self, stop: asyncio.Event) -> None:
        restart_failed_watches(self.resync.list_soon)
        parse_deep_objects()
        other_tasks = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=build_registry(
                Handlers(self._finetunejob, self._modelpromotion, self._finetuneschedule, self._child),
                has_network_policies=self.settings.network_policies,
            ),
            standalone=True,
            # NB: kopf's default is the name of the operating system's user, and the user of a container may have no name.
            identity=socket.gethostname(),  # type: ignore[arg-type]
            clusterwide=not self.settings.namespaces,
            namespaces=list(self.settings.namespaces),
            stop_flag=stop,
        )
        # These handlers replace kopf's, which would end the watches before the Lease is released.
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, self.terminated.set)
        await kopf.run_tasks(tasks, ignored=other_tasks)

    async def _work(self) -> None:
        """Wait until this replica is the leader and its store is complete; then run the workers and the leader's other tasks."""
        await self.election.won.wait()
        await self.resync.list_anew()
        # After SIGTERM, the queues stay closed.
        if self.terminated.is_set():
            return
        self.queues.open()
        self.resync.queue_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.abandoned_runs.run())
            group.create_task(self.gauges.run())
            group.create_task(self._send_notices())
            for _ in range(self.settings.workers):
                group.create_task(work(self.queues.finetunejobs, self.finetunejobs.handle))
                group.create_task(work(self.queues.promotions, self.promotions.handle))
                group.create_task(work(self.queues.schedules, self.schedules.handle))

    async def _send_notices(self) -> None:
        """Send notices of moves, after those of the last minutes, which the replica that led before may not have sent."""
        oldest = utc_now() - timedelta(seconds=REPEAT_SECONDS)
        for body in self.store.promotions.values():
            try:
                promotion = read_promotion(body)
            except UnreadableStatusError:
                continue
            notices = list_notices(promotion, promotion.status)
            self.sender.announce_again(notice for notice in notices if notice.time > oldest)
        await self.sender.run()

    async def _finetunejob(self, kind: str | None, body: Json) -> None:
        """Handle an event of a FineTuneJob, which may be the source of promotions, and may belong to a schedule."""
        meta = body["metadata"]
        finetunejob_events.on_event(self.store, self.queues.finetunejobs, kind, body)
        promotion_events.on_finetunejob(self.store, self.queues.promotions, meta["namespace"], meta["name"])
        schedule_events.on_finetunejob(self.queues.schedules, body)
        if kind == "DELETED":
            await self._forget_deleted(body)

    async def _forget_deleted(self, body: Json) -> None:
        ftj = read_finetunejob(body, self.settings.defaults)
        self.observer.forget(ftj)
        self.finetunejobs.forget(ftj)
        is_permitted = self.permissions.refuse_job(ftj.namespace, ftj.written, ftj.spec) is None
        if self.election.won.is_set() and is_permitted:
            await close_run_of_deleted(self.observer, ftj)

    async def _forget_vanished(self) -> None:
        """Forget the jobs of whose deletion only a list tells, and close their runs, one after the other."""
        while True:
            await self._forget_deleted(await self.deleted_jobs.get())

    async def _modelpromotion(self, kind: str | None, body: Json) -> None:
        promotion_events.on_event(self.store, self.queues.promotions, kind, body)
        if kind != "DELETED" or not self.election.won.is_set():
            return
        promotion = read_promotion(body)
        if self.permissions.refuse_promotion(promotion.namespace, promotion.spec) is None:
            await self.promotions.applier.child_jobs.close_runs_of_deleted(promotion)

    async def _finetuneschedule(self, kind: str | None, body: Json) -> None:
        schedule_events.on_event(self.store, self.queues.schedules, kind, body)

    async def _child(self, child: str, kind: str | None, body: Json) -> None:
        if promotion_events.is_child(body):
            promotion_events.on_child(self.store, self.queues.promotions, child, kind, body)
            return
        finetunejob_events.on_child(self.store, self.queues.finetunejobs, child, kind, body)


def _create_election(kube: Kube, settings: Settings, process: str) -> Election:
    # NB: a clock that counts suspended time too: a Lease also expires while the machine of its holder is suspended.
    identity = build_identity(settings.replica or socket.gethostname(), process)
    leases = Leases(kube, settings.namespace, identity, settings.lease_seconds, seconds_since_boot)
    return Election(leases, settings.lease_name, settings.replica, PROCESS_FENCE)


def _create_promotion_reconciler(
    kube: Kube,
    store: Store,
    queues: Queues,
    permissions: Permissions,
    writer: AliasWriter,
    *,
    announce: Callable[[Notice], None],
) -> ModelPromotionReconciler:
    settings = permissions.settings

    def moved(model: str) -> None:
        # An alias of the model moved: promotions whose source is this alias need not wait for their next poll.
        promotion_events.on_model(store, queues.promotions, model)

    owners = AliasOwners(kube, settings.namespace, seconds_since_boot)
    observer = ModelPromotionObserver(kube, store, settings, clock=time.monotonic, owners=owners)
    applier = ModelPromotionApplier(kube, store, observer, writer, moved, announce)
    return ModelPromotionReconciler(
        store, queues.promotions, observer, applier, settings, permissions=permissions
    )


def _measure(queues: Queues) -> None:
    """Export the length of each queue, the age of its oldest key, and whether this replica leads."""
    for kind, queue in queues.by_kind.items():
        metrics.queue_depth.labels(kind).set_function(lambda queue=queue: len(queue))  # type: ignore[misc]
        metrics.queue_oldest_seconds.labels(kind).set_function(queue.oldest_age_seconds)
    metrics.is_leader.set_function(lambda: float(PROCESS_FENCE.is_open))


if __name__ == "__main__":
    sys.exit(main())
