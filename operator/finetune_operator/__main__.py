"""Start the operator: `finetune-operator`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import kopf
import prometheus_client

from finetune_crds.conditions import Reason
from finetune_operator import metrics
from finetune_operator.apply import Applier
from finetune_operator.kube import Kube, KubeError
from finetune_operator.model import Json
from finetune_operator.observe import Observer, read_job
from finetune_operator.promotion.apply import PromotionApplier
from finetune_operator.promotion.observe import PromotionObserver
from finetune_operator.promotion.reconcile import PromotionReconciler
from finetune_operator.reconcile import Reconciler
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.resync import Resync
from finetune_operator.settings import Settings, SettingsError
from finetune_operator.store import Store
from finetune_operator.tracking import TrackingError
from finetune_operator.watches import Health, promotions_of_model, registry
from finetune_operator.workqueue import Queues, WorkQueue, work

log = logging.getLogger("finetune_operator")


def main() -> int:
    """Run until stopped; the exit code says whether the configuration was usable."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 64
    _configure_logging(settings)
    asyncio.run(run(settings))
    return 0


async def run(settings: Settings) -> None:
    """Everything the operator does, until SIGTERM or until one of its parts fails."""
    async with Kube() as kube:
        # NB: MLflow's and Databricks' clients block a thread each, and one that waits must not hold up the others.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * settings.workers, "client"))
        store = Store()
        queues = Queues(WorkQueue(clock=time.monotonic), WorkQueue(clock=time.monotonic))
        health = Health(queues, settings.resync_seconds)
        observer = Observer(kube, store, settings, clock=time.monotonic)
        writer = AliasWriter(kube, settings, identity=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        jobs = Reconciler(store, queues.jobs, observer, Applier(kube, store, observer, writer), settings)
        promotions = _promotions(kube, store, queues, settings, writer)
        resync = Resync(kube, store, queues, settings, health)
        _measure(queues)
        port = int(os.environ.get("FINETUNE_METRICS_PORT", "8081"))
        if port:
            prometheus_client.start_http_server(port)

        async def on_gone(body: Json) -> None:
            await _close_run_of_deleted(observer, body)

        async def workers() -> None:
            await resync.first.wait()
            async with asyncio.TaskGroup() as group:
                for _ in range(settings.workers):
                    group.create_task(work(queues.jobs, jobs.handle))
                    group.create_task(work(queues.promotions, promotions.handle))

        stop = asyncio.Event()
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry(store, queues, health, on_gone),
                standalone=True,
                # NB: left to itself kopf asks for the user's name, and a pod's uid need not have one.
                identity=socket.gethostname(),  # type: ignore[arg-type]
                clusterwide=not settings.namespaces,
                namespaces=list(settings.namespaces),
                liveness_endpoint=os.environ.get("FINETUNE_LIVENESS", "http://0.0.0.0:8080/healthz"),
                stop_flag=stop,
            )
        )
        parts = {watching, asyncio.create_task(resync.run()), asyncio.create_task(workers())}
        log.info("watching %s", ", ".join(settings.namespaces) or "all namespaces")
        # kopf handles SIGTERM and returns; any other part that ends has failed.
        done, running = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        for part in running - {watching}:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for part in done:
            part.result()


def _promotions(
    kube: Kube, store: Store, queues: Queues, settings: Settings, writer: AliasWriter
) -> PromotionReconciler:
    """The part that keeps aliases."""

    def moved(model: str) -> None:
        # What takes its version from this alias need not wait for the next resync.
        for key in promotions_of_model(store, model):
            queues.promotions.add(key)

    observer = PromotionObserver(kube, store, settings, clock=time.monotonic)
    applier = PromotionApplier(kube, store, observer, writer, moved)
    return PromotionReconciler(store, queues.promotions, observer, applier, settings)


def _measure(queues: Queues) -> None:
    for kind, queue in (("FineTuneJob", queues.jobs), ("ModelPromotion", queues.promotions)):
        metrics.queue_depth.labels(kind).set_function(lambda queue=queue: len(queue))  # type: ignore[misc]
        metrics.queue_oldest_seconds.labels(kind).set_function(queue.oldest_age)


async def _close_run_of_deleted(observer: Observer, body: Json) -> None:
    """A job deleted before its end leaves its MLflow run open: close it, as far as MLflow can be reached."""
    job = read_job(body)
    observer.forget(job)
    run_id = job.status.mlflow.run_id if job.status.mlflow else None
    if run_id is None or any(item.reason == Reason.RUN_FINISHED for item in job.status.conditions):
        return
    ends = {"Succeeded": "FINISHED", "Failed": "FAILED"}
    try:
        server = await observer.server(job)
        if server:
            await asyncio.to_thread(server.finish_run, run_id, ends.get(job.status.phase or "", "KILLED"))
            log.info("%s was deleted: closed its MLflow run %s", job.key, run_id)
    except (TrackingError, KubeError) as error:
        log.warning("%s was deleted; its MLflow run %s stays open: %s", job.key, run_id, error)


def _configure_logging(settings: Settings) -> None:
    kopf.configure(
        verbose=settings.log_level == "DEBUG",
        log_format=kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL,
    )
    logging.getLogger().setLevel(settings.log_level)
    for chatty in ("kopf.objects", "aiohttp.access", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
