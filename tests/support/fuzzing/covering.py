"""A covering array: combinations in which every possible pair of values occurs.

Greedy, a combination at a time, after D. M. Cohen et al., "The AETG system", IEEE TSE 1997. Every
value is chosen with a look at the rules that it leaves open, so a pair for which no combination is
found is impossible.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations

from fuzzing.space import Combination, Impossible, Space

Value = tuple[str, str]
Pair = tuple[Value, Value]
TRIED = 4
"""Combinations of which the one with the most new pairs is taken."""


def covering_array(
    space: Space, seed: str, covered: Collection[Pair] = ()
) -> Iterator[dict[str, str]]:
    """Choose combinations until every possible pair of values that is not covered has occurred."""
    drawn = random.Random(seed)
    left = sorted(all_pairs(space) - set(covered))
    drawn.shuffle(left)
    missing = set(left)
    solver = Solver(space)
    for pair in left:
        if pair not in missing:
            continue
        found = [solver.complete(dict(pair), drawn, missing) for _ in range(TRIED)]
        best = max(found, key=lambda row: 0 if row is None else len(pairs_of(row) & missing))
        if best is not None:
            missing -= pairs_of(best)
            yield best


def pairs_of(combination: Combination) -> set[Pair]:
    """All pairs of values in one combination."""
    return set(combinations(sorted(combination.items()), 2))


def all_pairs(space: Space) -> set[Pair]:
    """Every pair of values of two settings, possible or not."""
    values = [(name, value) for name, s in sorted(space.settings.items()) for value in s.values]
    return {(a, b) for a, b in combinations(sorted(values), 2) if a[0] != b[0]}


def possible_pairs(space: Space) -> set[Pair]:
    """Every pair of values that occurs in some possible combination."""
    drawn, solver = random.Random(0), Solver(space)
    known: set[Pair] = set()
    for pair in sorted(all_pairs(space)):
        if pair not in known and (row := solver.complete(dict(pair), drawn)) is not None:
            known |= pairs_of(row)
    return known


class Solver:
    """Completes partial combinations within the rules of a space."""

    def __init__(self, space: Space) -> None:
        self._settings = space.settings
        self._rules: dict[str, list[Impossible]] = {name: [] for name in space.settings}
        for rule in space.impossible:
            for name in rule.values:
                self._rules[name].append(rule)

    def complete(
        self, partial: Combination, drawn: random.Random, wanted: Iterable[Pair] = ()
    ) -> dict[str, str] | None:
        """Give every setting a value, preferably those with the most wanted pairs.

        Returns:
            None if no possible combination has the values of the partial one.
        """
        domains = {name: set(setting.values) for name, setting in self._settings.items()}
        for name, value in partial.items():
            domains[name] = {value}
        if not self._narrow(domains, list(partial)):
            return None
        order = list(domains)
        drawn.shuffle(order)
        return self._choose(domains, order, _Wanted(wanted, drawn))

    def _choose(
        self, domains: dict[str, set[str]], order: list[str], wanted: _Wanted
    ) -> dict[str, str] | None:
        if not order:
            return {name: next(iter(values)) for name, values in domains.items()}
        name, rest = order[0], order[1:]
        known = [(n, next(iter(values))) for n, values in domains.items() if len(values) == 1]
        for value in wanted.best_first(name, domains[name], known):
            narrowed = {n: set(values) for n, values in domains.items()} | {name: {value}}
            if self._narrow(narrowed, [name]):
                found = self._choose(narrowed, rest, wanted)
                if found is not None:
                    return found
        return None

    def _narrow(self, domains: dict[str, set[str]], changed: list[str]) -> bool:
        """Take out values that a rule forbids, now that some settings have only one value left.

        Returns:
            False if a setting has no value left.
        """
        while changed:
            for rule in self._rules[changed.pop()]:
                open_ones = [n for n, values in rule.values.items() if not domains[n] <= values]
                if not open_ones:
                    return False
                if len(open_ones) == 1 and domains[open_ones[0]] & rule.values[open_ones[0]]:
                    domains[open_ones[0]] -= rule.values[open_ones[0]]
                    changed.append(open_ones[0])
        return True


class _Wanted:
    """Orders values by how many wanted pairs they make, and by chance among equals."""

    def __init__(self, pairs: Iterable[Pair], drawn: random.Random) -> None:
        self._pairs = frozenset(pairs)
        self._drawn = drawn

    def best_first(self, name: str, values: set[str], known: list[Value]) -> list[str]:
        """Order the values of a setting, where some others have theirs already."""
        shuffled = sorted(values)
        self._drawn.shuffle(shuffled)

        def gain(value: str) -> int:
            pairs = (tuple(sorted(((name, value), other))) for other in known)
            return sum(pair in self._pairs for pair in pairs)

        return sorted(shuffled, key=gain, reverse=True)
