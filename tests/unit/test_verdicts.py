"""Argo CD, kstatus and `kubectl wait` agree on where a resource stands. What kstatus itself says is in the integration tier."""

from __future__ import annotations

from fixtures.operator_in_memory.verdicts import SAME, VERDICTS, bodies, waits_ended
from unit.test_argocd_health import health


async def test_argocd_says_what_the_table_says() -> None:
    found = {name: health(body["kind"], body)["status"] for name, body in (await bodies()).items()}
    assert found == {name: verdict.argo for name, verdict in VERDICTS.items()}


async def test_kubectl_waits_for_what_the_table_says() -> None:
    found = {name: waits_ended(body) for name, body in (await bodies()).items()}
    assert found == {name: verdict.waits for name, verdict in VERDICTS.items()}


def test_argocd_and_kstatus_have_the_same_verdict() -> None:
    """But for what is suspended, or waits for a person."""
    different = {
        name for name, verdict in VERDICTS.items() if verdict.argo not in (SAME[verdict.kstatus], "Suspended")
    }
    suspended = {name for name, verdict in VERDICTS.items() if verdict.argo == "Suspended"}
    assert different == set()
    assert all("suspended" in name or "approval" in name for name in suspended)
