"""The list of mutants in mutants.yaml: which ones there are, and whether the tests killed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

KILLED, LIVED, NOT_COVERED, EQUIVALENT, NOT_MEASURED = (
    "killed",
    "lived",
    "not covered",
    "equivalent",
    "not measured",
)

_HEADER = """\
# The mutants of `make mutants`: small faults in product code, and whether the tests notice them.
#
# A mutant is the operator (tests/long/mutants/operators.py) applied to the fragment in the function. `occurrence` counts
# equal fragments of the function from 0, and `place` those that differ in their names only. `make mutants` writes result,
# by and left_out. `reason` is written by hand: why a mutant is equivalent, or why it may live. After a rename,
# `python -m long.mutants repair` finds the mutants again.
"""


@dataclass(frozen=True)
class Mutant:
    """A fault in product code, and what became of it when it was last measured.

    Attributes:
        function: `module:qualified name`.
        place: its place among the fragments of the function that differ in their names only, where there are several:
            what tells them apart after a rename.
        by: the test that killed it.
        left_out: how many of the tests that cover it did not run, because they take too long.
        reason: why it is equivalent, or why it may live.
    """

    id: str
    function: str
    operator: str
    fragment: str
    occurrence: int = 0
    place: str = ""
    result: str = NOT_MEASURED
    by: str = ""
    left_out: int = 0
    reason: str = ""

    @property
    def module(self) -> str:
        """The module of its function."""
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The qualified name of its function, in its module."""
        return self.function.partition(":")[2]


@dataclass(frozen=True)
class Listing:
    """The list: its mutants, and of which run their results are."""

    mutants: Sequence[Mutant]
    measured: dict[str, Any] = field(default_factory=dict)


def load(path: Path) -> Listing:
    """Read the list; an empty one where there is none."""
    if not path.exists():
        return Listing([])
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Listing([Mutant(**mutant) for mutant in content["mutants"]], content["measured"])


def save(path: Path, listing: Listing) -> None:
    """Write the list, without the fields that say nothing."""
    mutants = [
        {name: value for name, value in asdict(mutant).items() if value or name == "id"}
        for mutant in sorted(listing.mutants, key=lambda mutant: (mutant.function, mutant.id))
    ]
    text = yaml.safe_dump({"measured": listing.measured}, sort_keys=False, allow_unicode=True)
    entries = (
        yaml.safe_dump([mutant], sort_keys=False, allow_unicode=True, width=1000) for mutant in mutants
    )
    path.write_text(f"{_HEADER}{text}mutants:\n{''.join(entries)}", encoding="utf-8")
