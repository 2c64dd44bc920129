"""A replica that was paused between its decision and its writes: nothing outdated is written, neither alias nor endpoint."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from finetune_operator.modelpromotion.model import Promotion, PromotionDecision
from finetune_operator.registry.base import MoveAlias
from finetune_operator.serving.model import ConfigureEndpoint
from fixtures.fake_databricks import Workspace
from fixtures.operator_in_memory.serving import MODEL, Databricks


def pause_before(kind: type, simulation: Databricks) -> None:
    """Suspend the promotion after its status was written, and before the first action of this kind."""
    applier = simulation.operator.reconciler.applier
    write_status = applier.write_status

    async def write_and_pause(
        promotion: Promotion, decision: PromotionDecision, now: datetime, **arguments: Any
    ) -> Any:
        body = await write_status(promotion, decision, now, **arguments)
        if any(isinstance(action, kind) for action in decision.actions):
            simulation.edit(suspend=True)
        return body

    applier.write_status = write_and_pause  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [MoveAlias, ConfigureEndpoint])
async def test_a_suspended_promotion_writes_nothing_that_was_decided_before(
    databricks: Workspace, kind: type
) -> None:
    simulation = Databricks(databricks)
    await simulation.stage(1)
    configured = simulation.configured()
    pause_before(kind, simulation)
    await simulation.stage(2)
    champion = simulation.state.models[MODEL].aliases["champion"]
    assert (simulation.status().phase, champion) == ("Suspended", 1 if kind is MoveAlias else 2)
    assert simulation.configured() == configured
