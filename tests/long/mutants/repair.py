"""Finds the mutants in the product, also after a rename."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from long.mutants.listing import Mutant
from long.mutants.operators import Candidate, place_of, shape_of
from long.mutants.product import Module, list_modules, read_module

_Match = tuple[str, Candidate]
"""A function, and a fault that can be put into it."""


class MissingMutantsError(Exception):
    """Mutants whose function is gone, or whose fragment is."""


def find_candidate(module: Module, mutant: Mutant) -> Candidate:
    """The fault of a mutant.

    Raises:
        MissingMutantsError: the module has no such function, or the function no such fragment.
    """
    if mutant.name not in module.functions:
        raise MissingMutantsError(f"{mutant.id}: there is no function {mutant.function}")
    for candidate in module.candidates(mutant.name):
        if _is_same(candidate, mutant):
            return candidate
    raise MissingMutantsError(
        f"{mutant.id}: {mutant.function} has nothing to apply {mutant.operator} to that reads {mutant.fragment}"
    )


def check(root: Path, mutants: Sequence[Mutant]) -> None:
    """Check that all mutants can be put into the product.

    Raises:
        MissingMutantsError: some cannot; the message names them all.
    """
    problems = [problem for mutant in mutants if (problem := _problem(root, mutant))]
    if problems:
        advice = (
            "python -m long.mutants repair finds what was renamed; remove the others from mutants.yaml, and "
            "python -m long.mutants choose puts new ones in their place"
        )
        raise MissingMutantsError("\n".join([*problems, advice]))


def repair(root: Path, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Find mutants again whose function or fragment has another name, where only one place fits; others stay as they are.

    A function that moved to another module keeps its name or the fragment. A fragment whose variables were renamed
    keeps its shape: the same operators, constants and calls.
    """
    modules = {module: read_module(root, module) for module in list_modules(root)}
    repaired = (_repair(modules, mutant) if _problem(root, mutant) else mutant for mutant in mutants)
    return [_with_place(modules, mutant) for mutant in repaired]


def _with_place(modules: dict[str, Module], mutant: Mutant) -> Mutant:
    candidates = modules[mutant.module].candidates(mutant.name) if mutant.module in modules else []
    for candidate in candidates:
        if _is_same(candidate, mutant):
            return replace(mutant, place=place_of(candidate, candidates))
    return mutant


def _problem(root: Path, mutant: Mutant) -> str:
    try:
        find_candidate(read_module(root, mutant.module), mutant)
    except FileNotFoundError:
        return f"{mutant.id}: there is no module {mutant.module}"
    except MissingMutantsError as error:
        return str(error)
    return ""


def _repair(modules: dict[str, Module], mutant: Mutant) -> Mutant:
    for places in (_same_function, _same_name, _same_fragment):
        match = _pick(list(places(modules, mutant)), mutant)
        if match is not None:
            function, candidate = match
            return replace(
                mutant, function=function, fragment=candidate.fragment, occurrence=candidate.occurrence
            )
    return mutant


def _pick(matches: Sequence[_Match], mutant: Mutant) -> _Match | None:
    """The only match of the same fragment, or that of the mutant's place where one function has as many as there were."""
    exact = [match for match in matches if match[1].fragment == mutant.fragment]
    if len(exact) == 1:
        return exact[0]
    place, total = map(int, (mutant.place or "1 of 1").split(" of "))
    is_one_function = len({function for function, _ in matches}) == 1
    return matches[place - 1] if is_one_function and len(matches) == total else None


def _same_function(modules: dict[str, Module], mutant: Mutant) -> Iterator[_Match]:
    """The function is there: faults of the same shape."""
    module = modules.get(mutant.module)
    if module is None:
        return
    for candidate in module.candidates(mutant.name):
        if _has_shape(candidate, mutant):
            yield mutant.function, candidate


def _same_name(modules: dict[str, Module], mutant: Mutant) -> Iterator[_Match]:
    """Functions of the same name in other modules: faults of the same shape."""
    for name, module in modules.items():
        for candidate in module.candidates(mutant.name) if name != mutant.module else ():
            if _has_shape(candidate, mutant):
                yield f"{name}:{mutant.name}", candidate


def _same_fragment(modules: dict[str, Module], mutant: Mutant) -> Iterator[_Match]:
    """Any function: the same fragment, and where there is none in the module, the same shape in the module."""
    everywhere = [
        (f"{name}:{function}", candidate)
        for name, module in modules.items()
        for function in module.functions
        for candidate in module.candidates(function)
        if candidate.operator == mutant.operator
    ]
    exact = [match for match in everywhere if match[1].fragment == mutant.fragment]
    yield from exact or [
        match
        for match in everywhere
        if match[0].partition(":")[0] == mutant.module and _has_shape(match[1], mutant)
    ]


def _is_same(candidate: Candidate, mutant: Mutant) -> bool:
    return (candidate.operator, candidate.fragment, candidate.occurrence) == (
        mutant.operator,
        mutant.fragment,
        mutant.occurrence,
    )


def _has_shape(candidate: Candidate, mutant: Mutant) -> bool:
    return candidate.operator == mutant.operator and candidate.shape == shape_of(
        mutant.operator, mutant.fragment
    )
