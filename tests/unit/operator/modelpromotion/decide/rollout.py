"""A promotion's endpoint, brought forward pass by pass against the stand-in workspace, through the real SDK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_crds.conditions import ConditionType
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus, Move, MoveReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.serving import serve
from finetune_operator.modelpromotion.model import (
    ClaimAlias,
    JobAction,
    Observed,
    Promotion,
    PromotionDecision,
)
from finetune_operator.policy.status import with_condition
from finetune_operator.registry.base import ModelVersion, MoveAlias, RegisteredModel
from finetune_operator.serving.choose import choose_backend
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, EndpointClient, ServedVersion
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace

Json = dict[str, Any]
NOW = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(poll_seconds=5)
MODEL = "main.llm.support"
GATE: Json = {"name": "latency", "type": "Metric", "metric": {"name": "latency", "max": 100}}
CANARY: Json = {
    "steps": [{"percent": 10, "durationSeconds": 600}, {"percent": 50, "durationSeconds": 1200}],
    "gates": [GATE],
}


def serving(*, canary: Json | None = None, **databricks: Any) -> Json:
    """spec.serving for the endpoint named support."""
    parts = {"canary": canary, "databricks": databricks}
    return {"type": "Databricks", "endpoint": "support"} | {
        name: part for name, part in parts.items() if part
    }


def promotion(status: ModelPromotionStatus, generation: int = 1, **parts: Any) -> Promotion:
    """The ModelPromotion team/champion."""
    body = {
        "model": MODEL,
        "alias": "champion",
        "source": {"type": "Alias", "alias": "candidate"},
        "serving": serving(),
    } | parts
    spec = ModelPromotionSpec.model_validate(body)
    return Promotion(
        name="champion",
        namespace="team",
        uid="u1",
        version="1",
        generation=generation,
        created=NOW,
        spec=spec,
        status=status,
        backend=choose_backend(spec.serving) if spec.serving else None,
    )


def decided(resource: Promotion, observed: Observed, now: datetime = NOW) -> PromotionDecision:
    """What the policy makes of it."""
    draft = Draft(resource, observed, now, SETTINGS)
    serve(draft)
    return draft.conclude()


@dataclass
class Rollout:
    """One promotion and its workspace. The status goes through its JSON on every pass, as over a restart."""

    workspace: Workspace
    spec: Json = field(default_factory=dict)
    versions: dict[str, ModelVersion | None] = field(default_factory=dict)
    status: ModelPromotionStatus = field(default_factory=ModelPromotionStatus)
    generation: int = 1
    now: datetime = NOW
    requeue: float | None = None
    refused: list[str] = field(default_factory=list)

    def promote(self, version: str, reason: MoveReason = "Promoted") -> None:
        """The alias moves."""
        before = self.status.promoted
        move = Move(
            from_version=before, to_version=version, reason=reason, message="m", by="me", time=self.now
        )
        self.versions.setdefault(version, ModelVersion(version, metrics={"latency": 50.0}))
        self.status = self.status.model_copy(
            update={"promoted": version, "previous": before, "history": [move, *self.status.history]}
        )

    def edit(self, **parts: Any) -> None:
        """A person changes the spec."""
        self.spec = self.spec | parts
        self.generation += 1

    def step(self, *, crash: bool = False) -> str:
        """One pass; the condition's reason after it. `crash`: the operator ends before it acts."""
        observation = self.observe()
        resource = promotion(self.status, self.generation, **self.spec)
        decision = decided(resource, self._observed(observation), self.now)
        self.status = ModelPromotionStatus.model_validate(decision.status.to_json())
        self.requeue = decision.requeue_seconds
        for action in () if crash else decision.actions:
            assert not isinstance(action, MoveAlias | ClaimAlias | JobAction)
            if isinstance(action, ConfigureEndpoint):
                # Nothing is asked for that the status did not know of before.
                assert resource.status.serving
                assert resource.status.serving.change
            try:
                self.open_endpoint().act(action)
            except ExternalError as error:
                self.refused.append(error.problem.reason)
                self._say(error.problem)
        return self.reason

    def _observed(self, endpoint: Endpoint) -> Observed:
        model = RegisteredModel(MODEL, {"champion": self.status.promoted} if self.status.promoted else {})
        return Observed(model=model, endpoint=endpoint, versions=dict(self.versions))

    def _say(self, problem: Problem) -> None:
        """What the applier says of an action that was refused."""
        self.status = with_condition(
            self.status,
            ConditionType.SERVED,
            False,
            problem.reason,
            problem.message,
            now=self.now,
            generation=self.generation,
        )

    def steps(self, count: int) -> list[str]:
        """Reasons after so many passes."""
        return [self.step() for _ in range(count)]

    def settle(self, limit: int = 30) -> list[str]:
        """Pass after pass until one changes nothing and asks for nothing; the reasons on the way, each once in a row."""
        expected_names: list[str] = []
        for _ in range(limit):
            before, writes = self.status, len(self.workspace.writes())
            reason = self.step()
            if not expected_names or expected_names[-1] != reason:
                expected_names.append(reason)
            is_settled = not self.updating()
            if is_settled and self.status == before and len(self.workspace.writes()) == writes:
                return expected_names
        raise AssertionError(f"it does not come to rest: {expected_names}")

    def updating(self) -> bool:
        """Whether Databricks is at a change."""
        endpoint_state = self.workspace.endpoints.held.get("support")
        state = endpoint_state.state.config_update if endpoint_state and endpoint_state.state else None
        return state is not None and state.value == "IN_PROGRESS"

    def wait(self, minutes: float) -> None:
        """Time passes."""
        self.now += timedelta(minutes=minutes)

    def withdraw(self) -> None:
        """What the alias policy does about a version that is withheld."""
        assert self.status.withheld
        assert self.status.previous
        back = self.status.previous
        self.promote(back, "Withdrawn")
        self.status = self.status.model_copy(update={"previous": None})

    def open_endpoint(self, **spec: Any) -> EndpointClient:
        """The client of the endpoint, for the operator or, with another spec, for another client."""
        backend = promotion(self.status, **self.spec | spec).backend
        assert backend
        return backend.open_client(SETTINGS, self.workspace.secret)

    def observe(self) -> Endpoint:
        """The endpoint as the SDK has it, or the problem, as the observer gives it to a pass."""
        try:
            return self.open_endpoint().read(with_traffic=True)
        except ExternalError as error:
            return Endpoint(problem=error.problem)

    @property
    def routes(self) -> Mapping[str, int]:
        """Who gets what in truth."""
        return self.workspace.endpoints.routes("support")

    @property
    def reason(self) -> str:
        """The reason in the condition."""
        return next((item.reason for item in self.status.conditions if item.type == ConditionType.SERVED), "")

    @property
    def message(self) -> str:
        """The message in the condition."""
        return next(
            (item.message for item in self.status.conditions if item.type == ConditionType.SERVED), ""
        )

    def judged(self, version: str, **metrics: float) -> None:
        """The version has these metrics."""
        self.versions[version] = ModelVersion(version, metrics=metrics)

    def by_hand(self, *shares: tuple[str, int], **parts: Any) -> None:
        """Another client configures the endpoint."""
        served = tuple(ServedVersion(MODEL, version, percent) for version, percent in shares)
        create = "support" not in self.workspace.endpoints.held
        self.open_endpoint(serving=serving(**parts)).act(ConfigureEndpoint(served, create))


def changed(status: ModelPromotionStatus) -> Json:
    """status.serving as JSON, without what differs from run to run."""
    serving_json = status.serving.to_json() if status.serving else {}
    return {
        name: value for name, value in serving_json.items() if name not in ("revision", "url", "settings")
    }


def served(databricks: Workspace, **spec: Any) -> Rollout:
    """An endpoint that serves version 1."""
    rollout = Rollout(databricks, spec)
    rollout.promote("1")
    rollout.settle()
    assert rollout.reason == "EndpointReady"
    databricks.asked.clear()
    return rollout
