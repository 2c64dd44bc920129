"""The second half of the demo: a version becomes champion, a worse one is refused, and a rollback."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from demo.install import NAMESPACE, SAMPLES, Installation
from demo.kubectl import DemoError, Json
from demo.terminal import Terminal, clock
from demo.wait import ProgressLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGING = SAMPLES / "promotion-staging.yaml"
CHAMPION = SAMPLES / "promotion-champion.yaml"
NAMES = ("staging", "champion")
SILENCE_SECONDS = 300
# Phases that only a user can end.
STUCK = ("Blocked",)


def promote(installation: Installation, version: str) -> None:
    """Apply the promotions, see the version through staging, approve it, and see it become champion."""
    terminal = installation.terminal
    with terminal.stage(
        "kubectl apply -f crds/samples/promotion-staging.yaml -f .../promotion-champion.yaml"
    ):
        for manifest in (STAGING, CHAMPION):
            installation.apply(manifest)
        follow(installation, "staging", at("Promoted", version))
        waiting = follow(installation, "champion", at("AwaitingApproval", None))
        tell_verdicts(terminal, waiting)
    approvals = {"approvals": [{"version": int(version), "by": "you"}]}
    with terminal.stage(patch_command("champion", approvals)):
        installation.patch("modelpromotion", "champion", approvals)
        follow(installation, "champion", at("Promoted", version))


def refuse(installation: Installation, good: str, worse: str) -> None:
    """Show how the gates refuse a version, with its numbers."""
    with installation.terminal.stage(f"version {worse} is candidate now: do the gates of staging take it?"):
        refused = follow(
            installation,
            "staging",
            lambda status: status.get("candidate") == worse and at("Refused", good)(status),
        )
        tell_verdicts(installation.terminal, refused)


def overrule(installation: Installation, worse: str) -> None:
    """Do what you should not: make the worse version champion, without its gates."""
    number = int(worse)
    change = {
        "source": {"type": "Version", "alias": None, "version": number},
        "gates": None,
        "approval": {"bypassSoak": True},
        "approvals": [{"version": number, "by": "somebody in a hurry"}],
    }
    with installation.terminal.stage(f"somebody overrules them: {patch_command('champion', change)}"):
        installation.patch("modelpromotion", "champion", change)
        follow(installation, "champion", at("Promoted", worse))


def roll_back(installation: Installation, good: str) -> None:
    """Roll back with one line."""
    change = {"rollbackTo": {"type": "Previous"}}
    with installation.terminal.stage(patch_command("champion", change)):
        installation.patch("modelpromotion", "champion", change)
        follow(installation, "champion", at("Promoted", good))


def forget(installation: Installation) -> None:
    """Delete the promotions of an earlier demo with their aliases, so that this one starts from the beginning."""
    kubectl = installation.place.kubectl
    for name in reversed(NAMES):
        if kubectl.get("modelpromotion", name, "--namespace", NAMESPACE):
            installation.terminal.detail(f"an earlier promotion {name} is there: deleting it, with its alias")
            installation.patch("modelpromotion", name, {"onDelete": "RemoveAlias", "suspend": False})
            # NB: the alias is removed only if the finalizer was set before the deletion.
            _wait(
                installation, name, lambda promotion: bool(promotion["metadata"].get("finalizers")), stuck=()
            )
            installation.delete("modelpromotion", name)


def follow(installation: Installation, name: str, reached: Callable[[Json], bool]) -> Json:
    """Show the state of a promotion, a line for each change, until its status is as expected.

    Raises:
        DemoError: it came to an end elsewhere, or not in time; with what it says.
    """
    began = time.monotonic()
    shown: str | None = None

    def seen(promotion: Json) -> bool:
        nonlocal shown
        text = line(promotion)
        if text != shown:
            shown = text
            installation.terminal.detail(f"{clock(time.monotonic() - began)}  {text}")
        return current(promotion) and reached(promotion["status"])

    return _wait(installation, name, seen)


def _wait(
    installation: Installation, name: str, is_reached: Callable[[Json], bool], stuck: tuple[str, ...] = STUCK
) -> Json:
    limit = ProgressLimit(f"the ModelPromotion {NAMESPACE}/{name}", SILENCE_SECONDS, installation.max_seconds)
    while True:
        promotion = installation.place.kubectl.get("modelpromotion", name, "--namespace", NAMESPACE)
        if promotion is None:
            raise DemoError(f"the ModelPromotion {NAMESPACE}/{name} was deleted")
        if is_reached(promotion):
            return promotion
        phase = promotion.get("status", {}).get("phase")
        if current(promotion) and phase in stuck:
            raise DemoError(f"{name} is {phase}: {why(promotion)}")
        state = f"{phase or 'Pending'}: {why(promotion)}"
        limit.record(f"{line(promotion)}; {state}")
        limit.check(state)
        time.sleep(0.5)


def current(promotion: Json) -> bool:
    """Whether the status describes the present spec."""
    generation: int = promotion["metadata"]["generation"]
    return bool(promotion.get("status", {}).get("observedGeneration") == generation)


def at(phase: str, version: str | None) -> Callable[[Json], bool]:
    """Whether a status has a phase, and the alias a version."""
    return lambda status: status.get("phase") == phase and status.get("current") == version


def line(promotion: Json) -> str:
    """The state of a promotion, in one line: phase, versions, gates, soak."""
    status = promotion.get("status", {})
    parts = [f"{promotion['metadata']['name']:<9}", f"{status.get('phase') or 'Pending':<17}"]
    parts.append(f"current {status.get('current') or '-'}")
    parts.append(f"candidate {status.get('candidate') or '-'}")
    if (status.get("gates") or {}).get("version") == status.get("candidate") and status.get("gates"):
        parts.append(f"gates {status['gates']['summary']}")
    if status.get("phase") == "Soaking":
        parts.append(f"until {status['soak']['endTime']}")
    return "  ".join(parts).rstrip()


def why(promotion: Json) -> str:
    """Why the promotion is where it is: the message of its condition Ready."""
    conditions = promotion.get("status", {}).get("conditions", [])
    messages = (item["message"] for item in conditions if item["type"] == "Ready")
    return next(messages, "the operator has not reconciled it yet")


def tell_verdicts(terminal: Terminal, promotion: Json) -> None:
    """Print the verdict of each gate."""
    for verdict in promotion["status"]["gates"]["verdicts"]:
        terminal.detail(f"{verdict['verdict']:<12}  {verdict['name']}: {verdict['message']}")


def patch_command(name: str, change: Json) -> str:
    """The command that a user would type."""
    return f"kubectl patch mprom {name} --type merge -p '{json.dumps({'spec': change})}'"


def summary(installation: Installation) -> Iterator[str]:
    """The promotions as kubectl shows them, and every move of the champion."""
    kubectl = installation.place.kubectl
    yield ""
    yield "The promotions"
    table = kubectl("get", "mprom", *NAMES, "--namespace", NAMESPACE)
    yield from (f"  {row}" for row in table.splitlines())
    yield ""
    yield "What became of the champion, newest first"
    champion = kubectl.get("modelpromotion", "champion", "--namespace", NAMESPACE)
    yield from (f"  {move(item)}" for item in (champion or {"status": {"history": []}})["status"]["history"])


def move(item: Json) -> str:
    """A move of the history, in one line."""
    versions = f"{item.get('fromVersion') or 'none'} -> {item.get('toVersion') or 'none'}"
    return f"{item['time']}  {versions:<9}  {item['reason']:<10}  by {item['by']}: {item['message']}"
