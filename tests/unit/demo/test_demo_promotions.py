"""What the demo prints of a promotion, and the lines that it tells people to type."""

from __future__ import annotations

import io
import json
import shlex
from typing import Any

import pytest
import yaml

from demo.promotions import (
    CHAMPION,
    NAMES,
    STAGING,
    at,
    current,
    line,
    move,
    patch_command,
    tell_verdicts,
    why,
)
from demo.terminal import Terminal

Json = dict[str, Any]


def promotion(generation: int = 1, **status: Any) -> Json:
    return {"metadata": {"name": "champion", "generation": generation}, "status": status}


GATES: Json = {"version": "2", "summary": "1/2", "verdicts": []}
SOAK: Json = {"version": "2", "endTime": "2026-11-21T12:00:10Z"}

LINES: dict[str, tuple[Json, str]] = {
    "nothing known": (promotion(), "champion   Pending            current -  candidate -"),
    "refused": (
        promotion(phase="Refused", current="1", candidate="2", gates=GATES),
        "champion   Refused            current 1  candidate 2  gates 1/2",
    ),
    "gates of another version": (
        promotion(phase="Pending", current="1", candidate="3", gates=GATES),
        "champion   Pending            current 1  candidate 3",
    ),
    "soaking": (
        promotion(phase="Soaking", candidate="2", gates=GATES, soak=SOAK),
        "champion   Soaking            current -  candidate 2  gates 1/2  until 2026-11-21T12:00:10Z",
    ),
}


@pytest.mark.parametrize(("found", "text"), LINES.values(), ids=LINES)
def test_line(found: Json, text: str) -> None:
    assert line(found) == text


def condition(kind: str, status: str) -> Json:
    return {"type": kind, "status": status, "message": f"about {kind}"}


WHY: dict[str, tuple[list[Json], str]] = {
    "no conditions yet": ([], "the operator has not reconciled it yet"),
    "Ready explains the others": (
        [condition("Promoted", "False"), condition("RegistryReady", "False"), condition("Ready", "False")],
        "about Ready",
    ),
}


@pytest.mark.parametrize(("conditions", "sentence"), WHY.values(), ids=WHY)
def test_why(conditions: list[Json], sentence: str) -> None:
    assert why(promotion(conditions=conditions)) == sentence


def test_a_status_of_an_older_spec_does_not_count() -> None:
    assert not current(promotion(2, observedGeneration=1))
    assert not current({"metadata": {"generation": 1}})
    assert current(promotion(2, observedGeneration=2))


def test_a_place_is_a_phase_and_a_version() -> None:
    assert at("Promoted", "1")({"phase": "Promoted", "current": "1"})
    assert not at("Promoted", "1")({"phase": "Promoted", "current": "2"})
    assert at("AwaitingApproval", None)({"phase": "AwaitingApproval"})


def test_the_line_to_type_is_one_that_a_shell_takes() -> None:
    words = shlex.split(patch_command("champion", {"rollbackTo": {"type": "Previous"}, "gates": None}))
    assert words[:-1] == ["kubectl", "patch", "mprom", "champion", "--type", "merge", "-p"]
    assert json.loads(words[-1]) == {"spec": {"rollbackTo": {"type": "Previous"}, "gates": None}}


def test_every_verdict_is_told_with_its_numbers() -> None:
    out = io.StringIO()
    verdicts = [
        {"verdict": "Passed", "name": "learned", "message": "5.8 <= 6"},
        {"verdict": "Inconclusive", "name": "same", "message": "no tag"},
    ]
    tell_verdicts(Terminal(out), promotion(gates={"verdicts": verdicts}))
    assert out.getvalue().split("\n") == [
        "        Passed        learned: 5.8 <= 6",
        "        Inconclusive  same: no tag",
        "",
    ]


def test_a_move_is_told_in_one_line() -> None:
    told = {
        "time": "2026-11-21T12:00:10Z",
        "toVersion": "1",
        "reason": "Promoted",
        "by": "you",
        "message": "well",
    }
    assert move(told) == "2026-11-21T12:00:10Z  none -> 1  Promoted    by you: well"


def test_the_promotions_are_those_of_the_samples() -> None:
    names = [
        yaml.safe_load(file.read_text(encoding="utf-8"))["metadata"]["name"] for file in (STAGING, CHAMPION)
    ]
    assert tuple(names) == NAMES
