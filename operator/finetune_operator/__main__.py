"""Start the operator: `finetune-operator`."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import kopf
import prometheus_client

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import metrics
from finetune_operator.controller.resync import Resync
from finetune_operator.controller.store import Store
from finetune_operator.controller.watches import Handlers, Health, registry
from finetune_operator.controller.workqueue import Queues, WorkQueue, work
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob import enqueue as finetunejob_events
from finetune_operator.finetunejob.apply import FineTuneJobApplier
from finetune_operator.finetunejob.observe import FineTuneJobObserver, read_finetunejob
from finetune_operator.finetunejob.reconcile import FineTuneJobReconciler
from finetune_operator.kube import Kube, KubeError
from finetune_operator.modelpromotion import enqueue as promotion_events
from finetune_operator.modelpromotion.apply import ModelPromotionApplier
from finetune_operator.modelpromotion.observe import ModelPromotionObserver
from finetune_operator.modelpromotion.reconcile import ModelPromotionReconciler
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings, SettingsError

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
        store = Store(children.owner)
        queues = Queues(WorkQueue(clock=time.monotonic), WorkQueue(clock=time.monotonic))
        health = Health(queues, settings.resync_seconds)
        observer = FineTuneJobObserver(kube, store, settings, clock=time.monotonic)
        writer = AliasWriter(kube, settings, identity=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        finetunejobs = FineTuneJobReconciler(
            store, queues.finetunejobs, observer, FineTuneJobApplier(kube, store, observer, writer), settings
        )
        promotions = _promotions(kube, store, queues, settings, writer)
        resync = Resync(kube, store, queues, settings, health)
        _measure(queues)
        if settings.metrics_port:
            prometheus_client.start_http_server(settings.metrics_port)

        async def on_finetunejob(kind: str | None, body: Json) -> None:
            meta = body["metadata"]
            finetunejob_events.on_event(store, queues.finetunejobs, kind, body)
            promotion_events.on_finetunejob(store, queues.promotions, meta["namespace"], meta["name"])
            if kind == "DELETED":
                await _close_run_of_deleted(observer, body)

        async def on_modelpromotion(kind: str | None, body: Json) -> None:
            promotion_events.on_event(store, queues.promotions, kind, body)

        async def on_child(child: str, kind: str | None, body: Json) -> None:
            finetunejob_events.on_child(store, queues.finetunejobs, child, kind, body)

        async def workers() -> None:
            await resync.first.wait()
            async with asyncio.TaskGroup() as group:
                for _ in range(settings.workers):
                    group.create_task(work(queues.finetunejobs, finetunejobs.handle))
                    group.create_task(work(queues.promotions, promotions.handle))

        stop = asyncio.Event()
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry(health, Handlers(on_finetunejob, on_modelpromotion, on_child)),
                standalone=True,
                # NB: left to itself kopf asks for the user's name, and a pod's uid need not have one.
                identity=socket.gethostname(),  # type: ignore[arg-type]
                clusterwide=not settings.namespaces,
                namespaces=list(settings.namespaces),
                liveness_endpoint=settings.liveness,
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
) -> ModelPromotionReconciler:
    """The part that keeps aliases."""

    def moved(model: str) -> None:
        # What takes its version from this alias need not wait for the next resync.
        promotion_events.on_model(store, queues.promotions, model)

    observer = ModelPromotionObserver(kube, store, settings, clock=time.monotonic)
    applier = ModelPromotionApplier(kube, store, observer, writer, moved)
    return ModelPromotionReconciler(store, queues.promotions, observer, applier, settings)


def _measure(queues: Queues) -> None:
    for kind, queue in (("FineTuneJob", queues.finetunejobs), ("ModelPromotion", queues.promotions)):
        metrics.queue_depth.labels(kind).set_function(lambda queue=queue: len(queue))  # type: ignore[misc]
        metrics.queue_oldest_seconds.labels(kind).set_function(queue.oldest_age)


async def _close_run_of_deleted(observer: FineTuneJobObserver, body: Json) -> None:
    """A job deleted before its end leaves its MLflow run open: close it, as far as MLflow can be reached."""
    ftj = read_finetunejob(body)
    observer.poller.forget(ftj)
    run_id = ftj.status.mlflow.run_id if ftj.status.mlflow else None
    if run_id is None or any(item.reason == ConditionReason.RUN_FINISHED for item in ftj.status.conditions):
        return
    ends = {"Succeeded": "FINISHED", "Failed": "FAILED"}
    try:
        server = await observer.poller.server(ftj)
        if server:
            await asyncio.to_thread(server.finish_run, run_id, ends.get(ftj.status.phase or "", "KILLED"))
            log.info("%s was deleted: closed its MLflow run %s", ftj.key, run_id)
    except (ExternalError, KubeError) as error:
        log.warning("%s was deleted; its MLflow run %s stays open: %s", ftj.key, run_id, error)


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
