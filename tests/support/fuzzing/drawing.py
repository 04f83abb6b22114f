"""Random combinations: a few unusual settings, and what else the rules then ask for."""

from __future__ import annotations

import random

from fuzzing.covering import Solver
from fuzzing.space import Space


def draw(space: Space, seed: str, least: int = 3, most: int = 12) -> dict[str, str]:
    """Draw a combination with a number of unusual settings; the seed alone decides."""
    drawn, solver = random.Random(seed), Solver(space)
    names = sorted(name for name, s in space.settings.items() if len(s.values) > 1)
    chosen: dict[str, str] = {}
    for name in drawn.sample(names, drawn.randint(least, most)):
        setting = space.settings[name]
        value = drawn.choice(setting.values[1:])
        if solver.complete({**chosen, name: value}, drawn) is not None:
            chosen[name] = value
    chosen.setdefault("schedule", drawn.choice(_allowed(solver, space, chosen, "schedule")))
    for name in names:
        with_usual = {**chosen, name: space.settings[name].default}
        if name not in chosen and solver.complete(with_usual, drawn) is not None:
            chosen = with_usual
    found = solver.complete(chosen, drawn)
    assert found is not None
    return found


def _allowed(solver: Solver, space: Space, chosen: dict[str, str], name: str) -> list[str]:
    values = space.settings[name].values
    drawn = random.Random(0)
    return [v for v in values if solver.complete({**chosen, name: v}, drawn) is not None]
