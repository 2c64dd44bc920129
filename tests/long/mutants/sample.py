"""The choice of mutants: by a fixed seed, spread over the packages in proportion to their code.

Each function has a seed of its own, so that changes elsewhere do not change its mutant.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from long.mutants.listing import Mutant
from long.mutants.operators import Candidate, place_of
from long.mutants.product import list_modules, read_module

SEED = 22

QUOTAS = {
    "finetune_crds": 6,
    "finetune_operator": 34,
    "finetune_trainer.evaluate": 3,
    "finetune_trainer.prep": 26,
    "finetune_trainer.train": 22,
    "finetune_trainer": 9,
}
"""How many mutants each part of the product has. Most of finetune_crds is fields, which are no functions."""

_MAX_WEIGHT = 12
"""A function with more faults to choose from is selected no more often."""

_COARSE = {"drop-return-value", "negate-condition", "swap-comparison"}
"""Operators whose faults nearly any test of the function notices; the others are selected rather than these."""


def find_part(module: str) -> str:
    """The part of the product that a module belongs to: the longest of QUOTAS that its name begins with."""
    return max((part for part in QUOTAS if f"{module}.".startswith(f"{part}.")), key=len)


def choose(root: Path, existing: Sequence[Mutant]) -> list[Mutant]:
    """Add mutants to those that exist until each part has its number; one for each function at most."""
    mutants = list(existing)
    used = {mutant.function for mutant in existing}
    counts = Counter(find_part(mutant.module) for mutant in existing)
    ids = iter(sorted({f"m{number:03}" for number in range(1, 1000)} - {mutant.id for mutant in existing}))
    candidates = _list_candidates(root)
    for part, quota in QUOTAS.items():
        weights = {
            function: len(of_function)
            for function, of_function in candidates.items()
            if find_part(function.partition(":")[0]) == part and function not in used
        }
        for function in _shuffle(weights, f"{SEED} {part}")[: max(quota - counts[part], 0)]:
            fault = _choose_fault(candidates[function], f"{SEED} {function}")
            place = place_of(fault, candidates[function])
            mutants.append(
                Mutant(next(ids), function, fault.operator, fault.fragment, fault.occurrence, place)
            )
    return mutants


def _list_candidates(root: Path) -> dict[str, list[Candidate]]:
    """The candidates of all functions that have some."""
    modules = {module: read_module(root, module) for module in list_modules(root)}
    candidates = {
        f"{module}:{function}": content.candidates(function)
        for module, content in modules.items()
        for function in content.functions
    }
    return {function: of_function for function, of_function in candidates.items() if of_function}


def _shuffle(weights: dict[str, int], seed: str) -> list[str]:
    """All functions in a random order, those with more faults rather at the front."""
    source = random.Random(seed)  # noqa: S311 - no secret
    keys = {
        function: source.random() ** (1 / min(weight, _MAX_WEIGHT))
        for function, weight in sorted(weights.items())
    }
    return sorted(keys, key=lambda function: -keys[function])


def _choose_fault(candidates: list[Candidate], seed: str) -> Candidate:
    source = random.Random(seed)  # noqa: S311 - no secret
    operators = sorted({candidate.operator for candidate in candidates})
    operator = source.choices(operators, [1 if name in _COARSE else 3 for name in operators])[0]
    return source.choice([candidate for candidate in candidates if candidate.operator == operator])
