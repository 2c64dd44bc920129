"""The page about troubleshooting has every condition and every reason, and the tables of phases every phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import PromotionPhase
from finetune_crds.status import Phase
from support.documents import PAGES

TEXT = {page.name: page.prose for page in PAGES}
PAGE = TEXT["docs/operations/troubleshooting.md"]


def chapters(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def first_cells(text: str) -> Iterator[str]:
    """The first cell of each row of the tables in a text, without the head."""
    rows = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    return (row.strip("*") for row in rows if row not in ("Reason", "Phase"))


def missing(text: str) -> set[str]:
    """What a page about troubleshooting should have and lacks, or has and should not."""
    found = {reason for chapter in chapters(text).values() for reason in first_cells(chapter)}
    return (found ^ {*ConditionReason}) | (chapters(text).keys() ^ {*ConditionType})


def test_every_condition_and_every_reason_is_there_and_no_other() -> None:
    assert missing(PAGE) == set()


def test_a_reason_is_once_in_a_chapter() -> None:
    counts = {name: Counter(first_cells(chapter)) for name, chapter in chapters(PAGE).items()}
    assert {name: count for name, count in counts.items() if count and max(count.values()) > 1} == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| GateFailed |", "| GateFaild |", {"GateFaild", "GateFailed"}),
        ("| *Soaked* |", "| *Soaking* |", {"Soaked"}),
        ("## Tracked", "## Traced", {"Tracked", "Traced"}),
    ],
)
def test_what_is_missing_is_found(old: str, new: str, said: set[str]) -> None:
    assert missing(PAGE.replace(old, new)) == said


def test_the_phases_of_a_job() -> None:
    text = TEXT["docs/finetunejob/index.md"].partition("### Phases")[2].partition("### ")[0]
    assert [*first_cells(text)] == [*get_args(Phase)]


def test_the_phases_of_a_promotion() -> None:
    text = chapters(TEXT["docs/modelpromotion/index.md"])["Follow a promotion"]
    assert [*first_cells(text)] == [*get_args(PromotionPhase)]
