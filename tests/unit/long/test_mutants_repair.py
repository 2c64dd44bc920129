"""Mutants are found again after a rename."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from long.mutants.listing import Mutant
from long.mutants.repair import MissingMutantsError, check, repair

MUTANT = Mutant("m001", "finetune_operator.gang:size", "swap-and-or", "found.count or 1")
BODY = "def size(found):\n    return found.count or 1\n"

RENAMED = {
    "lines that moved": ("gang", "import os\n\n\n" + BODY, MUTANT.function, MUTANT.fragment),
    "a module": ("pods.gang", BODY, "finetune_operator.pods.gang:size", MUTANT.fragment),
    "a variable": ("gang", BODY.replace("found", "pods"), MUTANT.function, "pods.count or 1"),
    "a module and a variable": (
        "pods.gang",
        BODY.replace("found", "pods"),
        "finetune_operator.pods.gang:size",
        "pods.count or 1",
    ),
    "a function": (
        "gang",
        BODY.replace("size", "count_pods"),
        "finetune_operator.gang:count_pods",
        MUTANT.fragment,
    ),
    "a function and a variable": (
        "gang",
        "def count_pods(pods):\n    return pods.count or 1\n",
        "finetune_operator.gang:count_pods",
        "pods.count or 1",
    ),
}
TWO = "def size({0}):\n    return ({0}.pods or 0) + ({0}.count or {1})\n"
LOST = {
    "no module": ("pods", "", "m001: there is no module finetune_operator.gang"),
    "no function": ("gang", "def other(): pass\n", "m001: there is no function finetune_operator.gang:size"),
    "no fragment": (
        "gang",
        "def size(found):\n    return len(found)\n",
        "m001: finetune_operator.gang:size has nothing to apply swap-and-or to that reads found.count or 1",
    ),
    "two that fit": (
        "gang",
        "def size(a, b):\n    return (a.count or 1) + (b.count or 1)\n",
        "m001: finetune_operator.gang:size has nothing to apply swap-and-or to that reads found.count or 1",
    ),
}


@pytest.mark.parametrize("case", RENAMED)
def test_a_mutant_is_found_after_a_rename_of(case: str, tmp_path: Path) -> None:
    module, source, function, fragment = RENAMED[case]
    _write(tmp_path, module, source)
    (repaired,) = repair(tmp_path, [MUTANT])
    assert repaired == Mutant("m001", function, MUTANT.operator, fragment)
    check(tmp_path, [repaired])


@pytest.mark.parametrize(("default", "fragment"), [(0, "pods.count or 0"), (1, "gang.count or 0")])
def test_of_fragments_that_differ_in_names_the_one_in_its_place_is_found(
    default: int, fragment: str, tmp_path: Path
) -> None:
    _write(tmp_path / "before", "gang", TWO.format("gang", 0))
    (mutant,) = repair(tmp_path / "before", [replace(MUTANT, fragment="gang.count or 0")])
    assert mutant.place == "2 of 2"
    _write(tmp_path / "after", "gang", TWO.format("pods", default))
    assert repair(tmp_path / "after", [mutant])[0].fragment == fragment


@pytest.mark.parametrize("case", LOST)
def test_a_mutant_that_is_gone_is_named(case: str, tmp_path: Path) -> None:
    module, source, problem = LOST[case]
    _write(tmp_path, module, source)
    assert repair(tmp_path, [MUTANT]) == [MUTANT]
    with pytest.raises(MissingMutantsError) as raised:
        check(tmp_path, [MUTANT])
    assert str(raised.value).splitlines()[0] == problem


def _write(root: Path, module: str, source: str) -> None:
    for package, folder in (("finetune_crds", "crds"), ("finetune_trainer", "trainer_image")):
        (root / folder / package).mkdir(parents=True)
    path = root / "operator" / "finetune_operator" / module.replace(".", "/")
    path.parent.mkdir(parents=True)
    path.with_suffix(".py").write_text(source, encoding="utf-8")
