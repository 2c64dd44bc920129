"""What is remembered of registries between passes, for whom, and for how long."""

from __future__ import annotations

import base64

import pytest

from finetune_crds.conditions import Reason
from finetune_operator.model import MlflowProblem
from finetune_operator.registry.base import ModelVersion
from finetune_operator.tracking import TrackingError
from unit.promotion.world import Json, World

AWAY = MlflowProblem(Reason.MLFLOW_UNREACHABLE, "MLflow at http://runs:5000 cannot be reached: HTTP 429")


def world() -> World:
    """Two versions, the first of them staging's."""
    there = World()
    for version in ("1", "2"):
        there.registry.add(version)
    there.registry.aliases["staging"] = "1"
    return there


SHARED: dict[str, tuple[Json, bool]] = {
    "the same servers and credentials": ({}, True),
    "another tracking server": (
        {"uri": "http://runs:5000", "registryUri": "http://mlflow:5000"},
        False,
    ),
    "a Secret of its own": ({"secretRef": {"name": "login"}}, False),
}


@pytest.mark.parametrize(("tracking", "shared"), SHARED.values(), ids=SHARED)
async def test_who_waits_for_a_server_that_did_not_answer(
    tracking: Json, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = world()
    data = {"MLFLOW_TRACKING_TOKEN": base64.b64encode(b"token").decode()}
    there.kube.keep({"kind": "Secret", "metadata": {"name": "login"}, "data": data})
    there.submit("one", tracking=tracking or None)
    there.submit("other")
    read, away = there.registry.version, [True]

    def version(name: str, number: str) -> ModelVersion | None:
        if away:
            raise TrackingError(AWAY)
        return read(name, number)

    monkeypatch.setattr(there.registry, "version", version)
    await there.operator.look("one")
    away.clear()
    await there.operator.look("other")
    assert there.says("RegistryReady", "one") == (AWAY.reason, AWAY.message)
    said = there.says("RegistryReady", "other")
    assert said == (
        (AWAY.reason, AWAY.message) if shared else ("RegistryReady", "the model registry answers")
    )
