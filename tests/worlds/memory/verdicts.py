"""Where resources can stand, as `decide` says it, and what tools read out of that: one table for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from finetune_crds.conditions import ConditionReason
from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.model import DryRunAnswer, FineTuneJob, Mlflow, Observed
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.settings import Settings
from standins.databricks import running as databricks
from worlds.memory.decisions import (
    NO_MLFLOW,
    SETTINGS,
    SOURCE,
    child,
    conclude,
    ended,
    ftj,
    observed,
    pod,
    running,
    tracked,
)
from worlds.memory.promotions import SETTINGS as PROMOTIONS
from worlds.memory.promotions import World
from worlds.memory.serving import Databricks

Json = dict[str, Any]
Kstatus = Literal["Current", "InProgress", "Failed", "Terminating"]
Argo = Literal["Healthy", "Progressing", "Degraded", "Suspended"]

SAME: dict[Kstatus, Argo] = {
    "Current": "Healthy",
    "InProgress": "Progressing",
    "Failed": "Degraded",
    "Terminating": "Progressing",
}
"""Argo CD's word for each of kstatus's. Suspended is a word of its own: kstatus has none for it."""


@dataclass(frozen=True)
class Verdict:
    """A resource, and what is read out of it.

    Attributes:
        body: makes the resource, with the status that `decide` gives it.
        kstatus: what kstatus, and with it Flux, makes of it.
        argo: what Argo CD makes of it.
        waits: the conditions that end a `kubectl wait --for=condition=...`.
    """

    body: Callable[[], Awaitable[Json]]
    kstatus: Kstatus
    argo: Argo
    waits: tuple[str, ...] = ()


def waits_ended(body: Json) -> tuple[str, ...]:
    """The conditions of the summary that a `kubectl wait` would find True."""
    conditions = (body.get("status") or {}).get("conditions") or []
    return tuple(
        kind
        for kind in ("Ready", "Finished")
        if any((item["type"], item["status"]) == (kind, "True") for item in conditions)
    )


# FineTuneJobs.


def _resource(kind: str, status: Json, **metadata: Any) -> Json:
    meta = {"name": "tune", "namespace": "team", "generation": 1} | metadata
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": kind,
        "metadata": meta,
        "spec": {},
        "status": status,
    }


def job(
    of: FineTuneJob | None = None,
    observation: Observed | None = None,
    *,
    settings: Settings = NO_MLFLOW,
    **meta: Any,
) -> Callable[[], Awaitable[Json]]:
    """A FineTuneJob after a pass."""

    async def body() -> Json:
        decision = conclude(of or ftj(), observation, settings=settings)
        return _resource("FineTuneJob", decision.status.to_json(), **meta)

    return body


def judged(admitted: bool | None, reason: ConditionReason) -> Callable[[], Awaitable[Json]]:
    """A FineTuneJob with a preparation, after a dry run with this answer."""

    async def body() -> Json:
        answer = DryRunAnswer(admitted, reason, "the API server said so")
        decision = conclude(ftj(data=SOURCE), answer=answer)
        return _resource("FineTuneJob", decision.status.to_json())

    return body


def untouched(kind: str) -> Callable[[], Awaitable[Json]]:
    """A resource that was just created, as the API server returns it."""

    async def body() -> Json:
        return _resource(kind, {"observedGeneration": -1})

    return body


JOB = "tune-train-1"
RESERVED: Json = {"spec": {"containers": [{"name": "main", "env": [{"name": "WORLD_SIZE", "value": "1"}]}]}}
NO_SECRET = Mlflow(problem=Problem(ConditionReason.CREDENTIALS_MISSING, "Secret login does not exist"))
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow cannot be reached")
PENDING = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no GPU"}
]
KNOWN_RUN = {"mlflow": MlflowStatus(run_id="r1", experiment_id="e1")}
FAILED_JOB = observed(child(JOB, "Failed"), pods=[ended(JOB, 0, 64), ended(JOB, 1, 64)])
COMPLETE = observed(child(JOB, "Complete"), pods=[ended(JOB, 0, 0), ended(JOB, 1, 0)])
TRAINING = observed(child(JOB), pods=[pod(JOB, 0), pod(JOB, 1)])


def _registered(mlflow: Mlflow) -> Observed:
    return replace(COMPLETE, mlflow=mlflow)


def _done() -> FineTuneJob:
    return ftj(running(**KNOWN_RUN), register={"model": "m"})


JOBS: dict[str, Verdict] = {
    "just created": Verdict(untouched("FineTuneJob"), "InProgress", "Progressing"),
    "changed since": Verdict(job(ftj(running()), TRAINING, generation=2), "InProgress", "Progressing"),
    "being deleted": Verdict(
        job(ftj(running()), TRAINING, deletionTimestamp="2026-08-01T12:00:00Z"), "Terminating", "Progressing"
    ),
    "waits for a server": Verdict(job(ftj(register={"model": "m"})), "InProgress", "Progressing"),
    "waits for a version of the operator that can": Verdict(
        job(ftj(data={**SOURCE, "source": {"type": "Hub", "dataset": "a/b"}})), "InProgress", "Progressing"
    ),
    "waits for a version of the operator that can read it": Verdict(
        job(replace(ftj(running()), spec=None, invalid="spec.method")), "InProgress", "Progressing"
    ),
    "waits for a Secret": Verdict(
        job(ftj(), observed(mlflow=NO_SECRET), settings=SETTINGS), "InProgress", "Progressing"
    ),
    "waits for MLflow": Verdict(
        job(ftj(), observed(mlflow=Mlflow(problem=AWAY)), settings=SETTINGS), "InProgress", "Progressing"
    ),
    "a reserved variable in pods": Verdict(
        job(ftj(pods={"train": {"template": RESERVED}})), "Failed", "Degraded"
    ),
    "a password in an address": Verdict(
        job(ftj(tracking={"uri": "http://me:pass@m:5000"})), "Failed", "Degraded", ("Finished",)
    ),
    "a typo in pods": Verdict(judged(False, ConditionReason.POD_TEMPLATE_INVALID), "Failed", "Degraded"),
    "refused by a policy": Verdict(judged(False, ConditionReason.POD_REJECTED), "InProgress", "Progressing"),
    "behind a webhook that fails": Verdict(
        judged(None, ConditionReason.CHECK_FAILED), "InProgress", "Progressing"
    ),
    "beyond a quota": Verdict(judged(False, ConditionReason.QUOTA_EXCEEDED), "InProgress", "Progressing"),
    "preparing": Verdict(judged(True, ConditionReason.PODS_ADMITTED), "InProgress", "Progressing"),
    "starting": Verdict(job(), "InProgress", "Progressing"),
    "not schedulable": Verdict(
        job(ftj(running()), observed(child(JOB), pods=[pod(JOB, 0, "Pending", conditions=PENDING)])),
        "InProgress",
        "Progressing",
    ),
    "pods beyond a quota": Verdict(
        job(ftj(running()), observed(child(JOB), rejections={JOB: "exceeded quota"})),
        "InProgress",
        "Progressing",
    ),
    "training": Verdict(job(ftj(running()), TRAINING), "InProgress", "Progressing"),
    "restarting": Verdict(
        job(ftj(running()), observed(child(JOB, "Failed"), pods=[ended(JOB, 0, 1)])),
        "InProgress",
        "Progressing",
    ),
    "waits for MLflow to register": Verdict(
        job(_done(), _registered(Mlflow(problem=AWAY)), settings=SETTINGS), "InProgress", "Progressing"
    ),
    "waits for a version": Verdict(
        job(_done(), _registered(tracked()), settings=SETTINGS), "InProgress", "Progressing"
    ),
    "suspended": Verdict(job(ftj(running(), suspend=True), TRAINING), "InProgress", "Suspended"),
    "succeeded": Verdict(job(ftj(running()), COMPLETE), "Current", "Healthy", ("Ready", "Finished")),
    "registered": Verdict(
        job(
            _done(),
            _registered(tracked(RegisteredVersion("m", "1", aliases=frozenset({"candidate"})))),
            settings=SETTINGS,
        ),
        "Current",
        "Healthy",
        ("Ready", "Finished"),
    ),
    "failed": Verdict(job(ftj(running()), FAILED_JOB), "Failed", "Degraded", ("Finished",)),
}


# ModelPromotions.

GATE = {"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.5}}
Story = Callable[[World], Awaitable[None]]


def promotion(*stories: Story, settings: Settings = PROMOTIONS, **spec: Any) -> Callable[[], Awaitable[Json]]:
    """A ModelPromotion from staging to champion after stories; versions 1 and 2 pass its gate, version 9 does not."""

    async def body() -> Json:
        world = World(settings=settings)
        for version, loss in (("1", 2.4), ("2", 2.2), ("9", 9.0)):
            world.registry.add(version, eval_loss=loss)
        world.submit(**({"gates": [GATE]} | spec))
        for story in (untold, *stories):
            await story(world)
            await passes(world)
        return dict(world.kube.objects["ModelPromotion", "team", "champion"])

    return body


async def untold(world: World) -> None:
    """Nothing happens."""


async def passes(world: World) -> None:
    """Passes over every promotion; one that is refused something never comes to rest."""
    for _ in range(8):
        world.seconds += world.settings.poll_seconds  # what is cached is forgotten
        for name in world.names():
            await world.operator.look(name)


def staged(version: str) -> Story:
    """The alias staging moves to a version."""

    async def story(world: World) -> None:
        world.registry.aliases["staging"] = version

    return story


def by_hand(version: str) -> Story:
    """A person moves the alias champion to a version."""

    async def story(world: World) -> None:
        world.registry.aliases["champion"] = version

    return story


def edited(**spec: Any) -> Story:
    """A person changes the spec."""

    async def story(world: World) -> None:
        world.edit(**spec)

    return story


def later(seconds: float) -> Story:
    """Time passes."""

    async def story(world: World) -> None:
        world.seconds += seconds

    return story


async def away(world: World) -> None:
    """The registry does not answer any more."""
    world.registry.problem = AWAY


async def forbidden(world: World) -> None:
    """The registry lets nobody write."""
    world.registry.refusal = Problem(ConditionReason.MLFLOW_FORBIDDEN, "no permission")


async def rival(world: World) -> None:
    """An older promotion keeps the same alias."""
    world.submit("older", alias="champion", source={"type": "Version", "version": "1"})
    older = world.kube.objects["ModelPromotion", "team", "older"]
    older["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    world.kube.keep(older)


async def failed_job(world: World) -> None:
    """The job that is the source fails."""
    failed: FineTuneJobStatus = conclude(ftj(running()), FAILED_JOB).status
    body = _resource("FineTuneJob", failed.to_json())
    world.kube.keep(
        {**body, "spec": {"model": {"base": "/m"}, "data": SOURCE, "register": {"model": "support-llama"}}}
    )


def served(
    *stories: Callable[[Databricks], Awaitable[None]], canary: Json | None = None
) -> Callable[[], Awaitable[Json]]:
    """A ModelPromotion with an endpoint, whose version 1 is served."""

    async def body() -> Json:
        with databricks() as state:
            world = Databricks(state, canary)
            await world.stage(1)
            for story in stories:
                await story(world)
            return dict(world.held)

    return body


async def next_version(world: Databricks) -> None:
    """Version 2 comes."""
    await world.stage(2)


async def no_secret(world: Databricks) -> None:
    """The Secret with the workspace's credentials is deleted."""
    del world.kube.objects["Secret", "team", "databricks"]
    await world.settle()


APPROVAL = {"timeoutSeconds": 600}
CANARY = {"steps": [{"percent": 10, "durationSeconds": 600}]}

PROMOTED: dict[str, Verdict] = {
    "just created": Verdict(untouched("ModelPromotion"), "InProgress", "Progressing"),
    "waits for a server": Verdict(
        promotion(settings=Settings(namespace="system")), "InProgress", "Progressing"
    ),
    "waits for the registry": Verdict(promotion(away), "InProgress", "Progressing"),
    "waits for its source": Verdict(promotion(), "InProgress", "Progressing"),
    "waits for a metric": Verdict(
        promotion(
            staged("1"),
            gates=[{"name": "other", "type": "Metric", "metric": {"name": "accuracy", "min": 0.5}}],
        ),
        "InProgress",
        "Progressing",
    ),
    "awaits approval": Verdict(promotion(staged("1"), approval=APPROVAL), "InProgress", "Suspended"),
    "awaits approval of the next": Verdict(
        promotion(staged("1"), edited(approval=APPROVAL), staged("2")), "InProgress", "Suspended", ("Ready",)
    ),
    "not approved in time": Verdict(
        promotion(staged("1"), later(700), approval=APPROVAL), "Failed", "Degraded"
    ),
    "soaking": Verdict(promotion(staged("1"), soakSeconds=86400), "InProgress", "Progressing"),
    "soaking beside a version that passed": Verdict(
        promotion(staged("1"), edited(soakSeconds=86400), staged("2")),
        "InProgress",
        "Progressing",
        ("Ready",),
    ),
    "promoted": Verdict(promotion(staged("1")), "Current", "Healthy", ("Ready",)),
    "promoted, and the registry is away": Verdict(
        promotion(staged("1"), away), "InProgress", "Progressing", ("Ready",)
    ),
    "refused": Verdict(promotion(staged("9")), "Failed", "Degraded"),
    "refused beside a version that passed": Verdict(
        promotion(staged("1"), staged("9")), "Current", "Healthy", ("Ready",)
    ),
    "refused beside a version that passed, and the registry is away": Verdict(
        promotion(staged("1"), staged("9"), away), "InProgress", "Progressing", ("Ready",)
    ),
    "not allowed to move the alias": Verdict(promotion(forbidden, staged("1")), "InProgress", "Progressing"),
    "not allowed to move it on": Verdict(
        promotion(staged("1"), forbidden, staged("2")), "InProgress", "Progressing", ("Ready",)
    ),
    "rolled back": Verdict(
        promotion(staged("1"), staged("2"), edited(rollbackTo={"type": "Previous"})),
        "Current",
        "Healthy",
        ("Ready",),
    ),
    "nothing to roll back to": Verdict(
        promotion(staged("1"), edited(rollbackTo={"type": "Version", "version": "7"})), "Failed", "Degraded"
    ),
    "drifted": Verdict(promotion(staged("1"), by_hand("2"), onDrift="Warn"), "Failed", "Degraded"),
    "repaired": Verdict(promotion(staged("1"), by_hand("2")), "Current", "Healthy", ("Ready",)),
    "another keeps the alias": Verdict(promotion(rival, staged("1")), "Failed", "Degraded"),
    "its job failed": Verdict(
        promotion(failed_job, source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}}),
        "Failed",
        "Degraded",
    ),
    "suspended": Verdict(promotion(staged("1"), edited(suspend=True)), "Current", "Suspended", ("Ready",)),
    "suspended before it was promoted": Verdict(
        promotion(staged("1"), suspend=True), "InProgress", "Suspended"
    ),
    "a password in an address": Verdict(
        promotion(staged("1"), tracking={"uri": "http://me:pass@m:5000"}), "Failed", "Degraded"
    ),
    "served": Verdict(served(), "Current", "Healthy", ("Ready",)),
    "its endpoint changes": Verdict(served(next_version, canary=CANARY), "InProgress", "Progressing"),
    "waits for the Secret of its workspace": Verdict(
        served(no_secret), "InProgress", "Progressing", ("Ready",)
    ),
}


VERDICTS: dict[str, Verdict] = {
    **{f"FineTuneJob {name}": verdict for name, verdict in JOBS.items()},
    **{f"ModelPromotion {name}": verdict for name, verdict in PROMOTED.items()},
}


async def bodies() -> dict[str, Json]:
    """Every resource of the table, by its name there."""
    return {name: await verdict.body() for name, verdict in VERDICTS.items()}
