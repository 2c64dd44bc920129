"""The endpoint's policy: for what is known and seen, the whole decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus, Move, MoveReason
from finetune_crds.serving import DatabricksServing, ServingStatus
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.model import Observed, PromotionAction
from finetune_operator.registry.base import ModelVersion, RegisteredModel
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, LogRequests, ServedVersion
from unit.operator.modelpromotion.decide.rollout import CANARY, GATE, MODEL, NOW, decided, promotion, serving

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
    """What is known and seen, and what comes of it. `asks`: the routes that Databricks is asked for in this pass."""

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
    logs: bool = False
    requeue: float | None = None
    withheld: str | None = None


STEADY: Json = {"settings": SETTINGS, "revision": "r1"}
SAVED = routes(v1=100)
WAITING = "another change of endpoint support is under way: waiting for its end"
TO_ALL = "endpoint support is being changed to serve version 2 with 100%"
TO_SOME = "endpoint support is being changed to serve version 2 with 10% and version 1 with 90%"
TO_BOTH = "endpoint support is being changed to serve version 2 with 80% and version 1 with 20%"
NO_WITHDRAWAL = "correct spec.serving.databricks or point the alias at another version; nothing is tried again until the spec changes"
CANNOT = (
    "endpoint support cannot serve version 2 as asked: Databricks could not deploy it: no machine; it goes back to "
    "version 1 with 100%, and champion to version 1"
)
FAILURE = {"version": "2", "generation": 1, "reason": "EndpointFailed", "message": "it failed"}

CASES: dict[str, Case] = {
    "no version yet": Case(
        endpoint=Endpoint(),
        promoted=None,
        condition=(
            False,
            ConditionReason.WAITING_FOR_VERSION,
            "champion points at no version yet: there is nothing to serve",
        ),
        serving=None,
    ),
    "not asked": Case(endpoint=None, condition=None, serving=None),
    "Databricks does not answer": Case(
        endpoint=Endpoint(problem=Problem(ConditionReason.DATABRICKS_UNREACHABLE, "no answer")),
        condition=(None, ConditionReason.DATABRICKS_UNREACHABLE, "no answer"),
        before={"endpoint": "support", "version": "2", "step": 1},
        serving={"endpoint": "support", "version": "2", "step": 1},
        requeue=5.0,
    ),
    "an endpoint of another owner": Case(
        endpoint=there(served=(ServedVersion("main.llm.other", "1", 100), ServedVersion("", "", 0))),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support serves another provider's model and the model main.llm.other, and is left alone: set "
            "spec.serving.databricks.endpoint to another name, or delete it",
        ),
        serving={
            "endpoint": "support",
            "url": "https://w/support",
            "state": "Ready",
            "routes": [{"version": "1", "percent": 100}, {"version": "", "percent": 0}],
        },
    ),
    "the same model in other letters": Case(
        endpoint=there(served=(ServedVersion("Main.LLM.support", "2", 100),)),
        spec={"tracking": {"registryUri": "databricks-uc"}},
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "a model in other letters, where letters count": Case(
        endpoint=there(served=(ServedVersion("Main.LLM.support", "2", 100),)),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support serves the model Main.LLM.support, and is left alone: set "
            "spec.serving.databricks.endpoint to another name, or delete it",
        ),
        serving={
            "endpoint": "support",
            "url": "https://w/support",
            "state": "Ready",
            "routes": [{"version": "2", "percent": 100}],
        },
    ),
    "missing: written down": Case(
        endpoint=Endpoint(),
        condition=(False, UPDATING, TO_ALL),
        serving={
            "endpoint": "support",
            "state": "Missing",
            "version": "2",
            "saved": [],
            "change": change(None, v2=100),
        },
        requeue=0.0,
    ),
    "missing: created": Case(
        endpoint=Endpoint(),
        before={"endpoint": "support", "version": "2", "saved": [], "change": change(None, v2=100)},
        condition=(False, UPDATING, TO_ALL),
        serving={
            "endpoint": "support",
            "state": "Missing",
            "version": "2",
            "saved": [],
            "change": change(None, v2=100),
        },
        asks=served(v2=100),
        creates=True,
        requeue=5.0,
    ),
    "another version: saved and written down": Case(
        endpoint=there(served=served(v1=100)),
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=0.0,
    ),
    "another version: asked for": Case(
        endpoint=there(served=served(v1=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        asks=served(v2=100),
        requeue=5.0,
    ),
    "another version: another client was faster": Case(
        endpoint=there("r2", served=served(v7=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v7": 100}, saved=SAVED, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
    "another version: under way": Case(
        endpoint=there("r2", served=served(v1=100), pending=served(v2=100), updating=True),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described("Updating", {"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=5.0,
    ),
    "another version: in place": Case(
        endpoint=there("r2", served=served(v2=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, settings=SETTINGS, revision="r2"),
    ),
    "configured, not ready": Case(
        endpoint=Endpoint(exists=True, revision="r2", url="https://w/support", served=served(v2=100)),
        before=described(saved=[], change=change(None, v2=100)),
        condition=(False, UPDATING, "endpoint support is configured, and does not answer yet"),
        serving=described("NotReady", {"v2": 100}, saved=[], settings=SETTINGS, revision="r2"),
        requeue=5.0,
    ),
    "at rest": Case(
        endpoint=there(served=served(v2=100)),
        before=described(shares={"v2": 100}, **STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "the previous version keeps a share": Case(
        endpoint=there(served=served(v1=100)),
        spec={"serving": serving(previousPercent=20)},
        before=described(saved=SAVED, change=change(v2=80, v1=20)),
        condition=(False, UPDATING, TO_BOTH),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=80, v1=20)),
        asks=served(v2=80, v1=20),
        requeue=5.0,
    ),
    "a previous version that is gone keeps none": Case(
        endpoint=there(served=served(v2=100)),
        spec={"serving": serving(previousPercent=20)},
        versions={"1": None},
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "a version that was rolled back from keeps none": Case(
        endpoint=there(served=served(v2=100)),
        spec={"serving": serving(previousPercent=20), "rollbackTo": "2"},
        reason="RolledBack",
        previous="3",
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "a change by another client": Case(
        endpoint=there("r2", served=served(v2=100), pending=served(v7=100), updating=True),
        before=described(**STEADY),
        condition=(False, BUSY, WAITING),
        serving=described("Updating", {"v2": 100}, **STEADY),
        requeue=5.0,
    ),
    "a change by another client that failed": Case(
        endpoint=there(
            "r2", served=served(v2=100), pending=served(v7=100), failed=True, message="no machine"
        ),
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described("UpdateFailed", {"v2": 100}, settings=SETTINGS, revision="r2"),
    ),
    "an old failure is not ours": Case(
        endpoint=there(served=served(v1=100), failed=True, message="no machine"),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described("UpdateFailed", {"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        asks=served(v2=100),
        requeue=5.0,
    ),
    "our change failed": Case(
        endpoint=there(
            "r2", served=served(v1=100), pending=served(v2=100), failed=True, message="no machine"
        ),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, CANNOT),
        serving=described(
            "UpdateFailed", {"v1": 100}, saved=SAVED, failure=FAILURE | {"message": CANNOT}, **STEADY
        ),
        withheld=CANNOT,
        requeue=0.0,
    ),
    "our change failed during a rollback": Case(
        endpoint=there("r2", served=served(v1=100), failed=True, message="no machine"),
        spec={"rollbackTo": "2"},
        reason="RolledBack",
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support cannot serve version 2 as asked: Databricks could not deploy it: no machine; it goes back "
            f"to version 1 with 100%: {NO_WITHDRAWAL}",
        ),
        serving=described(
            "UpdateFailed",
            {"v1": 100},
            saved=SAVED,
            failure=FAILURE
            | {
                "message": "endpoint support cannot serve version 2 as asked: Databricks could not deploy it: no "
                f"machine; it goes back to version 1 with 100%: {NO_WITHDRAWAL}"
            },
            **STEADY,
        ),
    ),
    "after a failure: back, written down": Case(
        endpoint=there("r2", served=served(v2=50, v1=50)),
        before=described(saved=SAVED, failure=FAILURE, **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(
            shares={"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY
        ),
        requeue=0.0,
    ),
    "after a failure: back, asked for": Case(
        endpoint=there("r2", served=served(v2=50, v1=50)),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(
            shares={"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY
        ),
        asks=served(v1=100),
        requeue=5.0,
    ),
    "after a failure: another change is in the way": Case(
        endpoint=there("r3", served=served(v2=50, v1=50), updating=True),
        before=described(saved=SAVED, failure=FAILURE, **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described("Updating", {"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, **STEADY),
        requeue=5.0,
    ),
    "after a failure: going back failed too": Case(
        endpoint=there("r3", served=served(v2=50, v1=50), failed=True, message="no machine at all"),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "it failed; going back failed too: no machine at all",
        ),
        serving=described(
            "UpdateFailed",
            {"v2": 50, "v1": 50},
            saved=SAVED,
            failure=FAILURE,
            change=change("r2", v1=100),
            **STEADY,
        ),
    ),
    "after a failure: at rest": Case(
        endpoint=there("r3", served=served(v1=100)),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(shares={"v1": 100}, saved=SAVED, failure=FAILURE, **STEADY),
    ),
    "after a failure: the spec changed": Case(
        endpoint=there("r3", served=served(v1=100)),
        before=described(saved=SAVED, failure=FAILURE | {"generation": 0}, **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change("r3", v2=100), **STEADY),
        requeue=0.0,
    ),
    "changed by hand": Case(
        endpoint=there("r2", served=served(v2=50, v7=50)),
        before=described(**STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v2": 50, "v7": 50}, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
    "another size by hand": Case(
        endpoint=there("r2", served=served(v2=100), as_asked=False),
        before=described(**STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v2": 100}, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
    "worded otherwise by Databricks": Case(
        endpoint=there(served=served(v2=100), as_asked=False),
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "requests are not logged": Case(
        endpoint=there(served=served(v2=100), inference_table=False),
        before=described(**STEADY),
        condition=(False, UPDATING, "endpoint support is being told to log its requests"),
        serving=described(shares={"v2": 100}, **STEADY),
        logs=True,
        requeue=5.0,
    ),
    "a canary begins": Case(
        endpoint=there(served=served(v1=100)),
        spec={"serving": serving(canary=CANARY)},
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_SOME),
        serving=described(
            shares={"v1": 100}, saved=SAVED, step=1, steps=2, change=change(v2=10, v1=90), **STEADY
        ),
        versions={"2": ModelVersion("2", metrics={"latency": 50.0})},
        requeue=0.0,
    ),
    "no canary for a repair": Case(
        endpoint=there(served=served(v1=100)),
        spec={"serving": serving(canary=CANARY)},
        reason="Repaired",
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=0.0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    moves = []
    if case.promoted:
        moves.append(
            Move(
                from_version=case.previous,
                to_version=case.promoted,
                reason=case.reason,
                message="m",
                by="me",
                at=NOW,
            )
        )
    status = ModelPromotionStatus(
        promoted=case.promoted,
        previous=case.previous,
        history=moves,
        serving=ServingStatus.model_validate(case.before) if case.before else None,
    )
    held = promotion(status, **case.spec)
    model = RegisteredModel(MODEL, {"champion": case.promoted} if case.promoted else {})
    decision = decided(held, Observed(model=model, endpoint=case.endpoint, versions=case.versions))
    said = [
        ({"True": True, "False": False}.get(item.status), item.reason, item.message)
        for item in decision.status.conditions
        if item.type == ConditionType.SERVED
    ]
    after = decision.status
    assert (
        after.serving.to_json() if after.serving else None,
        said,
        decision.actions,
        decision.requeue_seconds,
        after.withheld.message if after.withheld else None,
    ) == (
        case.serving,
        [case.condition] if case.condition else [],
        actions(case, held.spec.serving.databricks if held.spec and held.spec.serving else None),
        case.requeue,
        case.withheld,
    )
    # Nothing else of the status is this policy's.
    own: Json = {"serving": None, "conditions": [], "withheld": None}
    assert after.model_copy(update=own) == status.model_copy(update=own)


def actions(case: Case, spec: DatabricksServing | None) -> tuple[PromotionAction, ...]:
    assert spec
    if case.logs:
        return (LogRequests(spec),)
    return (ConfigureEndpoint(spec, case.asks, case.creates),) if case.asks else ()


def test_the_digest_is_of_what_databricks_is_told() -> None:
    """An edit of anything else changes nothing at the endpoint."""
    edits: dict[str, Json] = {
        "a canary": {"canary": CANARY},
        "a Secret": {"secretRef": {"name": "other"}},
        "defaults": {"workloadSize": "Small", "workloadType": "CPU", "scaleToZero": True},
        "a gate": {"canary": {"steps": [{"percent": 5, "minutes": 1}], "gates": [GATE]}},
    }
    for name, edit in edits.items():
        status = ModelPromotionStatus(
            promoted="2", previous="1", serving=ServingStatus.model_validate(described(**STEADY))
        )
        held = promotion(status, 2, serving=serving(**edit))
        decision = decided(held, Observed(endpoint=there(served=served(v2=100))))
        assert (name, decision.actions, decision.requeue_seconds) == (name, (), None)
