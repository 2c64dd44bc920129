"""A world for promotions: the operator's parts on a registry and an API server in memory, and a clock.

Every write to either of the two is counted, and the operator can be made to die before or after any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_crds.conditions import ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator.controller.reconciler import BUSY_SECONDS
from finetune_operator.controller.store import RESOURCES, Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import KubeError
from finetune_operator.modelpromotion.apply import ModelPromotionApplier
from finetune_operator.modelpromotion.observe import ModelPromotionObserver
from finetune_operator.modelpromotion.reconcile import ModelPromotionReconciler
from finetune_operator.registry.base import ModelVersion, RegisteredModel
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings
from standins.kube import StandIn
from worlds.memory.decisions import later

Json = dict[str, Any]
MODEL = "support-llama"
SETTINGS = Settings(tracking_uri="http://mlflow:5000", namespace="system")


class KilledError(BaseException):
    """The operator's process ends here, without a word."""


@dataclass
class Writes:
    """Counts writes, and kills the operator before or after the one that is named."""

    count: int = 0
    kill_before: int | None = None
    kill_after: int | None = None
    log: list[str] = field(default_factory=list)

    def kill_soon(self, writes: int, *, before: bool) -> None:
        """The operator dies before, or after, one of the writes to come."""
        at = self.count + writes
        self.kill_before, self.kill_after = (at, None) if before else (None, at)

    def spare(self) -> None:
        """It lives."""
        self.kill_before = self.kill_after = None

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        self.count += 1
        number = self.count
        if number == self.kill_before:
            raise KilledError(f"before write {number}: {what}")
        yield
        self.log.append(what)
        if number == self.kill_after:
            raise KilledError(f"after write {number}: {what}")


@dataclass
class Memory:
    """A model registry in memory."""

    writes: Writes
    versions: dict[str, ModelVersion] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    exists: bool = True
    problem: Problem | None = None
    refusal: Problem | None = None
    """Why aliases cannot be written."""
    asked: int = 0
    moves: list[tuple[str, str | None]] = field(default_factory=list)
    """Every alias write, as (alias, version)."""
    uri: str = "http://mlflow:5000"
    judge: Callable[[str | None], None] = lambda _: None
    """Called just before an alias is written."""

    before_reading: Callable[[], None] = lambda: None
    number: int = 1
    """Another registry has another number, and other times of creation for that reason."""

    @property
    def created(self) -> datetime:
        """When the model was created."""
        return datetime(2026, 7, self.number, tzinfo=UTC)

    def _ask(self) -> None:
        self.asked += 1
        self.before_reading()
        if self.problem:
            raise ExternalError(self.problem)

    def model(self, name: str) -> RegisteredModel | None:
        self._ask()
        return (
            RegisteredModel(name, dict(self.aliases), self.created) if name == MODEL and self.exists else None
        )

    def version(self, name: str, version: str) -> ModelVersion | None:
        self._ask()
        return self.versions.get(version)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self._ask()
        if self.refusal:
            raise ExternalError(self.refusal)
        with self.writes.one(f"alias {alias}={version}"):
            self.judge(version)
            self.aliases[alias] = version
            self.moves.append((alias, version))

    def delete_alias(self, name: str, alias: str) -> None:
        self._ask()
        with self.writes.one(f"alias {alias} removed"):
            self.aliases.pop(alias, None)
            self.moves.append((alias, None))

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        self._ask()
        with self.writes.one(f"tags of {version}"):
            current = self.versions[version]
            self.versions[version] = replace(current, tags={**current.tags, **tags})

    def add(
        self, version: str, data: str | None = "d1", tags: Mapping[str, str] | None = None, **metrics: float
    ) -> None:
        """Register a version with metrics, evaluated on this data."""
        created = self.created + timedelta(seconds=int(version))
        run = f"r{version}-{self.number}"
        self.versions[version] = ModelVersion(version, True, run, tags or {}, metrics, data, created)

    def delete(self, version: str) -> None:
        """Delete a version, and with it what points at it, as MLflow does."""
        self.versions.pop(version)
        self.aliases = {alias: target for alias, target in self.aliases.items() if target != version}


class ApiServer(StandIn):
    """The API server in memory, with writes that are counted."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self.writes = writes

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        if dry_run:
            return await super().create(body, dry_run=True)
        with self.writes.one(f"create {body['kind']}"):
            return await super().create(body)

    async def apply(self, body: Json, *, subresource: str = "") -> Json:
        with self.writes.one(f"{subresource or 'apply'} {body['kind']}"):
            return await super().apply(body, subresource=subresource)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, version: str = "", *, foreground: bool = False
    ) -> None:
        with self.writes.one(f"delete {kind}"):
            await super().delete(kind, namespace, name, uid, version, foreground=foreground)


@dataclass
class Operator:
    """One process of the operator."""

    world: World
    name: str

    def __post_init__(self) -> None:
        world = self.world
        self.store = Store()
        self.queue = WorkQueue(clock=lambda: world.seconds)
        observer = ModelPromotionObserver(
            world.kube,
            self.store,
            world.settings,
            clock=lambda: world.seconds,
            open=lambda *_: world.registry,
        )
        writer = AliasWriter(world.kube, world.settings, self.name, clock=lambda: world.seconds)
        applier = ModelPromotionApplier(world.kube, self.store, observer, writer, moved=lambda _: None)
        self.reconciler = ModelPromotionReconciler(
            self.store, self.queue, observer, applier, world.settings, now=lambda: later(world.seconds)
        )
        self.watch()

    def watch(self) -> None:
        """The watches deliver everything, also what is gone."""
        for kind in RESOURCES:
            bodies = [
                body for (body_kind, _, _), body in self.world.kube.objects.items() if body_kind == kind
            ]
            self.store.replace(kind, bodies, self.world.kube.version)

    async def look(self, name: str) -> float | None:
        """One pass over a promotion; the seconds until the next, as far as the pass has a wish."""
        self.watch()
        body = self.store.promotions.get(("team", name))
        try:
            return await self.reconciler.reconcile(body) if body else None
        except (ExternalError, KubeError):
            return self.queue.retry(f"team/{name}")
        finally:
            check_ready(self.world, name)


def check_ready(world: World, name: str) -> None:
    """Ready contradicts neither the phase, nor the alias, nor the endpoint, nor the registry."""
    body = world.kube.objects.get(("ModelPromotion", "team", name))
    if body is None or not (body.get("status") or {}).get("conditions"):
        return
    status = world.status(name)
    ready = next(item for item in status.conditions if item.type == ConditionType.READY)
    if status.phase == "Promoted":
        assert ready.status == "True"
    if status.phase == "Blocked" or any(
        item.type == "Served" and item.status != "True" for item in status.conditions
    ):
        assert ready.status == "False"
    if ready.status == "True":
        assert status.current == status.promoted
        assert (world.says("RegistryReady", name) or ("",))[0] != "RegistryChanged"
    other_conditions = [item for item in status.conditions if item.type != ConditionType.READY]
    assert any(
        item.reason == ready.reason and ready.message.endswith(item.message) for item in other_conditions
    )


PREVIOUS = {"type": "Previous"}
"""spec.rollbackTo: to the version before."""


def back_to(version: str) -> dict[str, str]:
    """spec.rollbackTo: to a version."""
    return {"type": "Version", "version": version}


@dataclass
class World:
    """Everything outside of the operator, and one operator to begin with."""

    settings: Settings = SETTINGS
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.writes = Writes()
        self.kube = ApiServer(self.writes)
        self.registry = Memory(self.writes)
        self.processes = 0
        self.restart()

    def restart(self) -> None:
        """The operator is started anew: it knows nothing but what is written down, and has another name."""
        self.processes += 1
        self.operator = Operator(self, f"operator-{self.processes}")

    def submit(self, name: str = "champion", **spec: Any) -> None:
        """Create a ModelPromotion, by default one whose source is the alias staging."""
        fields = {"model": MODEL, "alias": name, "source": {"type": "Alias", "alias": "staging"}} | spec
        self.kube.keep(
            {
                "apiVersion": "finetune.dev/v1alpha1",
                "kind": "ModelPromotion",
                "metadata": {"name": name, "namespace": "team", "generation": 1},
                "spec": {key: value for key, value in fields.items() if value is not None},
            }
        )

    def edit(self, name: str = "champion", *, by: str = "kubectl-patch", **spec: Any) -> None:
        """Change parts of the spec; None takes a part away."""
        current = self.kube.objects["ModelPromotion", "team", name]
        parts = {**current["spec"], **spec}
        meta = current["metadata"]
        edit = {
            "manager": by,
            "operation": "Update",
            "time": str(later(self.seconds)),
            "fieldsV1": {"f:spec": {}},
        }
        self.kube.keep(
            {
                **current,
                "metadata": {**meta, "generation": meta["generation"] + 1, "managedFields": [edit]},
                "spec": {key: value for key, value in parts.items() if value is not None},
            }
        )

    def remove(self, name: str = "champion") -> None:
        """Kubectl delete."""
        key = ("ModelPromotion", "team", name)
        current = self.kube.objects[key]
        if current["metadata"].get("finalizers"):
            self.kube.keep(
                {**current, "metadata": {**current["metadata"], "deletionTimestamp": "2026-08-01T12:00:00Z"}}
            )
        else:
            del self.kube.objects[key]

    def names(self) -> list[str]:
        return [name for kind, _, name in self.kube.objects if kind == "ModelPromotion"]

    async def settle(self, *, rounds: int = 30) -> None:
        """Passes over every promotion, until a round writes nothing. Time stands still."""
        for _ in range(rounds):
            before, soon = self.writes.count, False
            for name in self.names():
                self.seconds += self.settings.poll_seconds  # what is cached is forgotten
                wish = await self.operator.look(name)
                soon = soon or (wish is not None and wish <= BUSY_SECONDS)
            if self.writes.count == before and not soon:
                return
        raise AssertionError(f"it never comes to rest: {self.writes.log[-20:]}")

    def status(self, name: str = "champion") -> ModelPromotionStatus:
        body = self.kube.objects["ModelPromotion", "team", name]
        return ModelPromotionStatus.model_validate(body.get("status") or {})

    def phase_and_reason(self, name: str = "champion") -> str:
        """The phase, and the reason of the condition Ready."""
        reason, _ = self.says(ConditionType.READY, name) or ("", "")
        return f"{self.status(name).phase}: {reason}"

    def says(self, kind: str, name: str = "champion") -> tuple[str, str] | None:
        """Reason and message of a condition."""
        for item in self.status(name).conditions:
            if item.type == kind:
                return item.reason, item.message
        return None

    def holds(self, kind: str, name: str = "champion") -> bool:
        """Whether a condition is True."""
        return any(item.type == kind and item.status == "True" for item in self.status(name).conditions)

    def moves(self, name: str = "champion") -> list[tuple[str, str | None, str | None]]:
        """The history, oldest first: reason, from, to."""
        return [
            (item.reason, item.from_version, item.to_version) for item in reversed(self.status(name).history)
        ]

    def events(self) -> list[str]:
        return [body["reason"] for (kind, _, _), body in self.kube.objects.items() if kind == "Event"]
