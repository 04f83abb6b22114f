"""The few unusual settings of a combination that a failure needs."""

from __future__ import annotations

from collections.abc import Callable

from fuzzing.space import Combination, Space


def shrink(
    space: Space, combination: Combination, fails: Callable[[Combination], bool]
) -> dict[str, str]:
    """Give settings their defaults, many at once and then each, while it fails the same way."""
    kept = dict(combination)
    at_once = max(1, len(space.unusual(kept)) // 2)
    while True:
        names = list(space.unusual(kept))
        for begin in range(0, len(names), at_once):
            usual = {n: space.settings[n].default for n in names[begin : begin + at_once]}
            tried = {**kept, **usual}
            if space.why_not(tried) is None and fails(tried):
                kept = tried
        if at_once == 1:
            return kept
        at_once //= 2
