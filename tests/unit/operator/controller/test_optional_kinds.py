"""NetworkPolicies are turned off if the operator has no right to list them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from finetune_operator.controller.optional_kinds import turn_off_forbidden_kinds
from finetune_operator.kube import KubeError
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn

ON = Settings(network_policies=True)
FORBIDDEN = KubeError(403, "networkpolicies is forbidden")
# The settings, the answer to the list (None: it succeeds), whether jobs get NetworkPolicies, and how many lines are logged.
ANSWERS: dict[str, tuple[Settings, KubeError | None, bool, int]] = {
    "the right to list them": (ON, None, True, 0),
    "no right to list them": (ON, FORBIDDEN, False, 1),
    "no right in the watched namespaces": (replace(ON, namespaces=("team", "other")), FORBIDDEN, False, 1),
    "off anyway": (Settings(), FORBIDDEN, False, 0),
    "an API server that is busy": (ON, KubeError(429, "try again"), True, 0),
    "an API server that does not answer": (ON, KubeError(0, "no connection"), True, 0),
}


@pytest.mark.parametrize(("settings", "answer", "is_on", "lines"), ANSWERS.values(), ids=ANSWERS)
async def test_a_forbidden_list_turns_network_policies_off(
    settings: Settings,
    answer: KubeError | None,
    lines: int,
    caplog: pytest.LogCaptureFixture,
    *,
    is_on: bool,
) -> None:
    api = StandIn()
    if answer:
        api.refuse["list", "NetworkPolicy"] = answer
    with caplog.at_level(logging.WARNING):
        assert await turn_off_forbidden_kinds(api, settings) == replace(settings, network_policies=is_on)
    assert len(caplog.records) == lines


async def test_an_api_server_that_hangs_does_not_delay_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    api = StandIn()

    async def list_forever(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(api, "list", list_forever)
    assert await turn_off_forbidden_kinds(api, ON) == ON
