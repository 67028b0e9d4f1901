"""A short list of settings in which every allowed pair of choices occurs (all-pairs testing), found greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(sorted(case), 2)}


def allowed_cases(choices: Mapping[str, Iterable[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    names = list(choices)
    every = (dict(zip(names, values, strict=True)) for values in product(*choices.values()))
    return [case for case in every if allowed(case)]


def covering_list(cases: list[Case]) -> list[Case]:
    """A subset of `cases` with all of their pairs; deterministic, and every prefix covers as much as it greedily
    can.
    """
    missing = set().union(*(pairs_of(case) for case in cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
