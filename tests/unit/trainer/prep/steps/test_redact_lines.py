"""How much of what is to be redacted is redacted, on labelled lines; the documentation has the same figures."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from finetune_trainer.prep.steps.patterns import PATTERNS
from unit.trainer.prep.labelled_lines import lines

PAGE = Path(__file__).parents[5] / "docs/finetunejob/data-clean.md"
ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\d\.\d\d) \| (\d\.\d\d) \|$", re.MULTILINE)


def test_precision_and_recall_are_those_of_the_documentation() -> None:
    labelled = lines()
    assert len({line.text for line in labelled}) > 400
    assert len(labelled) == 500
    texts = pa.array([line.text for line in labelled])
    figures = {}
    for kind, pattern in PATTERNS.items():
        hints = pc.match_substring_regex(texts, pattern.hint).to_pylist()
        measured = {
            (number, begin, end)
            for number, line in enumerate(labelled)
            if hints[number]
            for begin, end in merged(sorted(pattern.find(line.text)))
        }
        expected = {
            (number, *place)
            for number, line in enumerate(labelled)
            for of, *place in line.values
            if of == kind
        }
        right = len(measured & expected)
        figures[kind] = (str(len(expected)), f"{right / len(measured):.2f}", f"{right / len(expected):.2f}")
    documented = {kind: tuple(numbers) for kind, *numbers in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    assert figures == documented


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans without those that others cover."""
    disjoint: list[tuple[int, int]] = []
    for begin, end in spans:
        if disjoint and begin < disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(end, disjoint[-1][1])
        else:
            disjoint.append((begin, end))
    return disjoint
