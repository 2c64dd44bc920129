"""The page about troubleshooting has every condition and every reason, and the tables of phases every phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import PromotionPhase
from finetune_crds.status_parts import Phase
from support.documents import PAGES

TROUBLESHOOTING = next(page for page in PAGES if page.name == "docs/operations/troubleshooting.md")
TEXT = {page.name: page.prose for page in PAGES}
PAGE = TROUBLESHOOTING.prose
INDEX = "Reasons from A to Z"


def chapters(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def first_cells(text: str) -> Iterator[str]:
    """The first cell of each row of the tables in a text, without the head."""
    rows = re.findall(r"^\| (?:<a id=[^>]+></a>)?([^|]+?) \|", text, re.MULTILINE)
    return (row.strip("*") for row in rows if row not in ("Reason", "Phase"))


def index(text: str) -> str:
    """The index that a page about troubleshooting should have: each reason with its anchor, or links to its anchors."""
    places: dict[str, list[str]] = {}
    for name, chapter in chapters(text).items():
        for reason in first_cells(chapter):
            places.setdefault(reason, []).append(name)
    letters: dict[str, list[str]] = {}
    for reason, names in sorted(places.items()):
        links = ", ".join(f"[{name}](#{name}-{reason})" for name in names)
        entry = f"[{reason}](#{reason})" if len(names) == 1 else f'<a id="{reason}"></a>{reason} ({links})'
        letters.setdefault(reason[0], []).append(entry)
    return "\n".join(f"- **{letter}** " + ",\n  ".join(entries) for letter, entries in letters.items())


def anchors_of_rows(text: str) -> Iterator[tuple[str, str]]:
    """The anchor of each row of reasons, and the one that it should have."""
    rows = [
        (name, *row)
        for name, chapter in chapters(text).items()
        for row in re.findall(r'^\| (?:<a id="([^"]+)"></a>)?\*?([A-Z]\w+)\*? \|', chapter, re.MULTILINE)
        if row[1] != "Reason"
    ]
    counts = Counter(reason for _, _, reason in rows)
    for name, written, reason in rows:
        yield written, reason if counts[reason] == 1 else f"{name}-{reason}"


def missing(text: str) -> set[str]:
    """What a page about troubleshooting should have and lacks, or has and should not."""
    found = {reason for chapter in chapters(text).values() for reason in first_cells(chapter)}
    return (found ^ {*ConditionReason}) | (chapters(text).keys() ^ {INDEX, *ConditionType})


def test_every_condition_and_every_reason_is_there_and_no_other() -> None:
    assert missing(PAGE) == set()


def test_every_reason_has_one_anchor_of_its_name() -> None:
    counts = Counter(TROUBLESHOOTING.ids)
    assert {reason: counts[reason] for reason in ConditionReason if counts[reason] != 1} == {}
    assert {name for name, count in counts.items() if count != 1} == set()


def test_every_row_has_its_anchor() -> None:
    assert [(written, anchor) for written, anchor in anchors_of_rows(PAGE) if written != anchor] == []


def test_the_page_begins_with_all_reasons_from_a_to_z() -> None:
    assert next(iter(chapters(PAGE))) == INDEX
    assert chapters(PAGE)[INDEX].partition("- **")[2] == index(PAGE).removeprefix("- **") + "\n\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('<a id="GateFailed"></a>', ""),
        ('<a id="GateFailed"></a>', '<a id="GatePassed"></a>'),
        ('<a id="Tracked-CredentialsMissing"></a>', '<a id="CredentialsMissing"></a>'),
    ],
)
def test_a_wrong_anchor_is_found(old: str, new: str) -> None:
    assert any(written != anchor for written, anchor in anchors_of_rows(PAGE.replace(old, new)))


def test_a_reason_is_once_in_a_chapter() -> None:
    counts = {name: Counter(first_cells(chapter)) for name, chapter in chapters(PAGE).items()}
    assert {name: count for name, count in counts.items() if count and max(count.values()) > 1} == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (">GateFailed |", ">GateFaild |", {"GateFaild", "GateFailed"}),
        (">*Soaked* |", ">*Soaking* |", {"Soaked"}),
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
