"""Cases of the endpoint's policies: from the status and the observed endpoint to the complete decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus, Move, MoveReason
from finetune_crds.serving import ServingStatus
from finetune_operator.modelpromotion.model import Observed, PromotionAction
from finetune_operator.registry.base import ModelVersion, RegisteredModel
from finetune_operator.serving.model import (
    ConfigureEndpoint,
    Endpoint,
    LogRequests,
    ServedVersion,
    StopLogging,
)
from unit.operator.modelpromotion.decide.rollout import MODEL, NOW, decided, promotion

Json = dict[str, Any]
SETTINGS = "3abcb05d82f6"  # digest of an endpoint with nothing set
UPDATING, READY, BUSY = (
    ConditionReason.ENDPOINT_UPDATING,
    ConditionReason.ENDPOINT_READY,
    ConditionReason.ENDPOINT_BUSY,
)


def served(**shares: int) -> tuple[ServedVersion, ...]:
    """v3=90 is version 3 with 90%."""
    return tuple(ServedVersion(MODEL, name[1:], percent) for name, percent in shares.items())


def routes(**shares: int) -> list[Json]:
    return [{"version": name[1:], "percent": percent} for name, percent in shares.items()]


def there(revision: str = "r1", **parts: Any) -> Endpoint:
    """An endpoint that answers."""
    return Endpoint(exists=True, ready=True, revision=revision, url="https://w/support", **parts)


def change(revision: str | None = "r1", **shares: int) -> Json:
    """A change as it is written down."""
    return {"routes": routes(**shares), "settings": SETTINGS} | ({"revision": revision} if revision else {})


def described(state: str = "Ready", shares: dict[str, int] | None = None, **parts: Any) -> Json:
    """status.serving."""
    now = {"routes": routes(**shares)} if shares else {}
    return {"endpoint": "support", "url": "https://w/support", "state": state, "version": "2"} | now | parts


@dataclass
class Case:
    """The inputs of a decision, and the decision. `asks`: the routes that this pass requests."""

    endpoint: Endpoint | None
    condition: tuple[bool | None, ConditionReason, str] | None
    serving: Json | None
    before: Json = field(default_factory=dict)
    spec: Json = field(default_factory=dict)
    reason: MoveReason = "Promoted"
    previous: str | None = "1"
    promoted: str | None = "2"
    versions: dict[str, ModelVersion | None] = field(default_factory=dict)
    asks: tuple[ServedVersion, ...] = ()
    creates: bool = False
    logs: type[LogRequests | StopLogging] | None = None
    requeue: float | None = None
    withheld: str | None = None


STEADY: Json = {"settings": SETTINGS, "revision": "r1"}
SAVED = routes(v1=100)
WAITING = "another change of endpoint support is in progress: waiting until it is complete"
TO_ALL = "endpoint support is being changed to serve version 2 with 100%"
TO_SOME = "endpoint support is being changed to serve version 2 with 10% and version 1 with 90%"
NO_WITHDRAWAL = "correct spec.serving or point the alias at another version; the operator does not retry until the spec changes"
CANNOT = (
    "endpoint support cannot serve version 2 as specified: its deployment failed: no machine; the endpoint is restored to version 1 with "
    "100%, and alias champion moves to version 1"
)
FAILURE = {"version": "2", "generation": 1, "reason": "EndpointFailed", "message": "it failed"}


def check(case: Case) -> None:
    """Decide, and compare the whole decision."""
    moves = []
    if case.promoted:
        moves.append(
            Move(
                from_version=case.previous,
                to_version=case.promoted,
                reason=case.reason,
                message="m",
                by="me",
                time=NOW,
            )
        )
    status = ModelPromotionStatus(
        promoted=case.promoted,
        previous=case.previous,
        history=moves,
        serving=ServingStatus.model_validate(case.before) if case.before else None,
    )
    resource = promotion(status, **case.spec)
    model = RegisteredModel(MODEL, {"champion": case.promoted} if case.promoted else {})
    decision = decided(resource, Observed(model=model, endpoint=case.endpoint, versions=case.versions))
    reported = [
        ({"True": True, "False": False}.get(item.status), item.reason, item.message)
        for item in decision.status.conditions
        if item.type == ConditionType.SERVED
    ]
    after = decision.status
    assert (
        after.serving.to_json() if after.serving else None,
        reported,
        decision.actions,
        decision.requeue_seconds,
        after.withheld.message if after.withheld else None,
    ) == (
        case.serving,
        [case.condition] if case.condition else [],
        _actions(case),
        case.requeue,
        case.withheld,
    )
    # Nothing else of the status is this policy's; a version that failed is recorded as bad.
    cleared: Json = {"serving": None, "conditions": [], "journal": None, "registry": None}
    assert after.model_copy(update=cleared) == status.model_copy(update=cleared)


def _actions(case: Case) -> tuple[PromotionAction, ...]:
    if case.logs:
        return (case.logs(),)
    return (ConfigureEndpoint(case.asks, case.creates),) if case.asks else ()
