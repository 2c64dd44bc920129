"""observe: the state of a promotion, from the store, the registry and the serving endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.modelpromotion import ModelPromotionSpec, PromotionTracking
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator import names, secrets
from finetune_operator.controller.reading import read_spec, read_status
from finetune_operator.controller.reconciler import utc_now
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import Kube
from finetune_operator.mlflow.runs import Server
from finetune_operator.modelpromotion.conflicts import ConflictFinder
from finetune_operator.modelpromotion.copy_reader import CopyReader, find_copy
from finetune_operator.modelpromotion.job_reader import JobReader
from finetune_operator.modelpromotion.model import Observed, Promotion, SourceJob
from finetune_operator.modelpromotion.model_cache import ModelCache, name_credentials
from finetune_operator.modelpromotion.number_reader import NumberReader, OpenPrometheus, needs_number
from finetune_operator.modelpromotion.version_records import import_history
from finetune_operator.modelpromotion.versions import main_version, named_version, target_version
from finetune_operator.prometheus import Prometheus
from finetune_operator.registry.alias_owners import AliasOwners
from finetune_operator.registry.base import ModelVersion, RegisteredModel, Registry, is_same_name
from finetune_operator.registry.choose import open_registry, resolve_registry
from finetune_operator.registry.outages import Outages
from finetune_operator.registry.ownership import UNSUPPORTED, Ownership
from finetune_operator.registry.tracked import Tracked, open_tracked
from finetune_operator.serving.choose import choose_backend
from finetune_operator.serving.model import Endpoint, EndpointClient, ServingBackend
from finetune_operator.settings import Settings
from finetune_operator.text import normalize_address, strip_user

# Logs in and returns the registry that a spec.tracking names, with the credentials of its Secret.
Open = Callable[[Settings, PromotionTracking, Mapping[str, str] | None], Registry]
# The same for the MLflow server; None without a server.
OpenRuns = Callable[[Settings, PromotionTracking, Mapping[str, str] | None], Tracked | None]


def read_promotion(body: Json) -> Promotion:
    """Return a ModelPromotion from its JSON. If the spec does not fit the schema, `invalid` has the reason.

    Raises:
        UnreadableStatusError: a newer version of the operator wrote the status.
    """
    meta = body["metadata"]
    spec, invalid = read_spec(ModelPromotionSpec, body)
    if spec and not spec.model:
        spec = spec.model_copy(update={"model": meta["name"]})
    status = import_history(read_status(ModelPromotionStatus, body, "promotion"))
    editor, edited = last_edit(meta.get("managedFields") or [])
    return Promotion(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        version=meta["resourceVersion"],
        generation=int(meta.get("generation", 1)),
        created=datetime.fromisoformat(meta["creationTimestamp"]),
        spec=spec,
        status=status,
        invalid=invalid,
        editor=editor,
        edited=edited,
        deleting="deletionTimestamp" in meta,
        finalizers=tuple(meta.get("finalizers") or ()),
        backend=choose_backend(spec.serving) if spec and spec.serving else None,
    )


def last_edit(fields: Iterable[Json]) -> tuple[str, datetime | None]:
    """The field manager that last changed the spec (kubectl-patch, argocd-controller and the like), and when."""
    edits = [
        item
        for item in fields
        if "f:spec" in (item.get("fieldsV1") or {}) and item.get("manager") != names.FIELD_MANAGER
    ]
    last = max(edits, key=lambda item: item.get("time") or "", default=None)
    if last is None:
        return "unknown", None
    return str(last["manager"]), datetime.fromisoformat(last["time"]) if last.get("time") else None


@dataclass
class ModelPromotionObserver:
    """Reads the store, the registry and the serving endpoint for one promotion at a time."""

    kube: Kube
    store: Store
    settings: Settings
    clock: Callable[[], float]
    open: Open = open_registry
    open_runs: OpenRuns = open_tracked
    now: Callable[[], datetime] = utc_now
    open_prometheus: OpenPrometheus = Prometheus
    owners: AliasOwners | None = None
    """Finds which installation moves an alias; None if there is only this one."""

    def __post_init__(self) -> None:
        self._outages = Outages(self.clock, self.settings.poll_seconds)
        self._conflicts = ConflictFinder(self.kube, self.store, self.settings)
        self.models = ModelCache(self.settings, self.clock)
        self._child_jobs = JobReader(self.kube, self.store, self.now)
        self._copy_reader = CopyReader(self.kube, self.settings, self._outages, self.open)
        self._number_reader = NumberReader(
            self.kube, self._outages, self.open_prometheus, self.settings.workers
        )

    async def observe(self, promotion: Promotion) -> Observed:
        """Read everything that `decide` needs.

        Raises:
            KubeError: the API server could not be read.
        """
        spec = promotion.spec
        if spec is None:
            return Observed()
        job, loop, source = self._find_job(promotion, spec), None, None
        child_jobs = self._child_jobs.find(promotion)
        try:
            rival = await self._conflicts.find_alias_conflict(promotion, spec)
            if rival:
                return Observed(rival=rival)
            loop = await self._conflicts.find_alias_loop(promotion, spec)
            source = await self._copy_reader.read(promotion, spec)
            observed = await self._observe_registry(promotion, spec, Observed(job=job, source_version=source))
            child_jobs = await self._child_jobs.read(promotion, child_jobs, self.open_server)
        except ExternalError as error:
            return Observed(
                problem=error.problem, job=job, source_version=source, loop=loop, child_jobs=child_jobs
            )
        return replace(
            observed,
            loop=loop,
            endpoint=await self._read_endpoint(promotion, spec),
            child_jobs=child_jobs,
            reading=await self._number_reader.read(promotion, spec),
        )

    async def registry(self, promotion: Promotion) -> Registry:
        """Open the registry of a promotion, with its credentials.

        Raises:
            ExternalError: the Secret with the credentials is missing, or the registry cannot be used.
        """
        tracking = promotion.spec.tracking if promotion.spec else PromotionTracking()
        secret = await secrets.read(self.kube, promotion.namespace, tracking.secret_ref, secrets.TRACKING)
        login = (self.settings.servers(tracking), secrets.build_key(secret))
        return await self._outages.log_in(login, partial(self.open, self.settings, tracking, secret))

    async def open_server(self, promotion: Promotion) -> Server | None:
        """Open the MLflow server with the runs of a promotion's gates, with its credentials; None without a server.

        Raises:
            ExternalError: the Secret with the credentials is missing, or the server cannot be used.
        """
        tracking = promotion.spec.tracking if promotion.spec else PromotionTracking()
        secret = await secrets.read(self.kube, promotion.namespace, tracking.secret_ref, secrets.TRACKING)
        login = ("runs", self.settings.servers(tracking), secrets.build_key(secret))
        tracked = await self._outages.log_in(login, partial(self.open_runs, self.settings, tracking, secret))
        return tracked.server if tracked else None

    async def open_endpoint(self, promotion: Promotion, backend: ServingBackend) -> EndpointClient:
        """Open the endpoint of a promotion, with its credentials.

        Raises:
            ExternalError: the Secret with the credentials is missing, or the server of the endpoint is not known.
        """
        namespace, reference = promotion.namespace, backend.secret_ref
        secret = await secrets.read(self.kube, namespace, reference, backend.secret_field)
        login = ("serving", backend.spec.type, secrets.build_key(secret))
        return await self._outages.log_in(login, partial(backend.open_client, self.settings, secret))

    async def _observe_registry(
        self, promotion: Promotion, spec: ModelPromotionSpec, observed: Observed
    ) -> Observed:
        """Add the model and the versions that this pass needs, the copy, and which installation moves the alias.

        Args:
            observed: the job and the version of another registry that the source names.
        """
        # NB: the key of an outage has the registry; the tracking server, from which the runs of versions are read; and the Secret, since it
        # may name the workspace, and a server may throttle only one login.
        server, registry_uri = (normalize_address(uri) for uri in self.settings.servers(spec.tracking))
        outage_key = (registry_uri, server, name_credentials(promotion, spec))
        async with self._outages.attempt(outage_key):
            registry = await self.registry(promotion)
            model = await self.models.read(promotion, spec, registry)
            if model is None:
                return observed
            source = observed.source_version
            if source:
                source = replace(source, copy=await find_copy(registry, spec.model, source))
            observed = replace(observed, model=model, source_version=source)
            needed = find_needed_versions(promotion, spec, observed)
            ownership = await self.find_ownership(promotion, spec, registry, model)
            versions = await asyncio.to_thread(_read_versions, registry, spec.model, needed) if needed else {}
            return replace(observed, versions=versions, ownership=ownership)

    async def find_ownership(
        self, promotion: Promotion, spec: ModelPromotionSpec, registry: Registry, model: RegisteredModel
    ) -> Ownership:
        """Find which installation moves the alias of a promotion.

        Raises:
            KubeError: the identity of this installation could not be read.
        """
        if self.owners is None:
            return UNSUPPORTED
        return await self.owners.find(registry, model, spec.alias, promotion.key)

    async def _read_endpoint(self, promotion: Promotion, spec: ModelPromotionSpec) -> Endpoint | None:
        """The serving endpoint, or the problem that keeps it from being read; None if no endpoint has to be read."""
        backend = promotion.backend
        if backend is None or spec.suspend or promotion.deleting:
            return None
        try:
            rival = await self._conflicts.find_endpoint_conflict(promotion, backend)
            if rival:
                message = (
                    f"ModelPromotion {rival} is older and manages endpoint {backend.spec.endpoint} on the same server: set "
                    "spec.serving.endpoint to another name"
                )
                return Endpoint(problem=Problem(ConditionReason.CONFLICT, message))
            client = await self.open_endpoint(promotion, backend)
            read = partial(client.read, with_traffic=_needs_traffic(promotion, spec, backend))
            return await self._outages.ask(_serving_outage_key(promotion, backend), read)
        except ExternalError as error:
            return Endpoint(problem=error.problem)

    def _find_job(self, promotion: Promotion, spec: ModelPromotionSpec) -> SourceJob | None:
        """The FineTuneJob that the source names, from the store."""
        body = self.store.finetunejobs.get((promotion.namespace, spec.source.job_name))
        if body is None:
            return None
        status = body.get("status") or {}
        phase, registered = status.get("phase") or "Pending", status.get("model") or {}
        name, version = registered.get("name"), registered.get("version")
        registry = resolve_registry(self.settings, (body.get("spec") or {}).get("tracking") or {})
        _, promotion_registry = self.settings.servers(spec.tracking)
        if registry != normalize_address(promotion_registry):
            # NB: a message may show the address, which may contain a password if the job was rejected.
            return SourceJob(phase=phase, model=name, elsewhere=strip_user(registry))
        if name and is_same_name(registry, name, spec.model):
            # As the promotion spells it.
            name = spec.model
        return SourceJob(phase=phase, model=name, version=version)


def _needs_traffic(promotion: Promotion, spec: ModelPromotionSpec, backend: ServingBackend) -> bool:
    """Whether the pass needs the metrics of the versions that the endpoint serves: for the gates of a canary, or for the watch."""
    has_canary_gates = backend.spec.canary is not None and bool(backend.spec.canary.gates)
    is_watched = spec.on_regression is not None and spec.on_regression.endpoint_metric is not None
    return has_canary_gates or (is_watched and needs_number(promotion, spec))


def _serving_outage_key(promotion: Promotion, backend: ServingBackend) -> Hashable:
    """A key for the server of the endpoint: the type and the Secret (empty for the chart's login) determine it."""
    reference = backend.secret_ref
    return "serving", backend.spec.type, f"{promotion.namespace}/{reference.name}" if reference else ""


def find_needed_versions(promotion: Promotion, spec: ModelPromotionSpec, observed: Observed) -> set[str]:
    """The versions that must be read.

    There are none while the alias is at its target, unless the endpoint, the deletion, a missing identity, or a version that may have to be
    withdrawn needs them.
    """
    status, holder = promotion.status, observed.alias(spec.alias)
    may_go_back = _may_go_back(status)
    candidate = named_version(spec, observed)
    target = target_version(spec, status)
    at_rest = (target or candidate) == holder == status.promoted and status.move is None
    if (
        at_rest
        and status.untagged is None
        and promotion.backend is None
        and not promotion.deleting
        and not may_go_back
        and _is_identified(status)
    ):
        return set()
    move_target = status.move.to_version if status.move else None
    versions = {candidate, holder, target, status.promoted, move_target}
    if promotion.backend or may_go_back:
        saved = status.serving.saved if status.serving else None
        back = status.withheld.back if status.withheld else None
        versions |= {status.previous, back, main_version(saved or [])}
    return {version for version in versions if version is not None}


def _may_go_back(status: ModelPromotionStatus) -> bool:
    """Whether the version with the alias is out of bounds after its move, or is withheld."""
    is_breached = status.watch is not None and status.watch.breach_time is not None
    return is_breached or (status.withheld is not None and status.withheld.version == status.promoted)


def _is_identified(status: ModelPromotionStatus) -> bool:
    """Whether the status has the identity of the promoted version, which older versions of the operator did not record."""
    identities = status.registry.versions if status.registry else []
    return status.promoted in {None, *(item.version for item in identities)}


def _read_versions(registry: Registry, model: str, versions: set[str]) -> dict[str, ModelVersion | None]:
    return {version: registry.version(model, version) for version in sorted(versions)}
