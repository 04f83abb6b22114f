"""Searches of little effort, for tests of what holds however long a search looks.

That an order is valid, keeps its limit, is drawn, written and read does not depend on how fast it
is; looking for a fast one takes seconds. With --full every search takes its whole effort.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from megatron_zb.plan import workers
from megatron_zb.schedules.features import pairs, recomputation, second_model_orders, vocabulary
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import hill_climbing, kernels, placement_search
from megatron_zb.schedules.search.hill_climbing import Found, Problem, search
from megatron_zb.schedules.search.runner import Effort

_search_pairs, _SECONDS = pairs.search_pairs, recomputation.SECONDS
_SECONDS_OF_SECOND = second_model_orders.SECONDS
_BRIEF_SECONDS = 0.2
_NO_EFFORT = Effort(0, 0)
_MOST = Effort(runs=100, moves=1000)
_MOST_WALKED = Effort(runs=60, moves=500)


@contextmanager
def briefly() -> Iterator[None]:
    """Let every search of this process that begins within the context look at little."""
    with pytest.MonkeyPatch.context() as patch:
        if "TESTS_FULL" not in os.environ:
            patch.setattr(placement_search, "search", brief_search)
            patch.setattr(vocabulary, "search", brief_search)
            patch.setattr(hill_climbing, "engine", lambda passes: kernels.engine(float("inf")))
            for module in (pairs, vocabulary):
                patch.setattr(module, "search_pairs", brief_search_of_pairs)
            for module in (recomputation, second_model_orders):
                patch.setattr(module, "SECONDS", _BRIEF_SECONDS)
            # a planner's other processes would search at length, once it has taken a while
            patch.setattr(workers, "AFTER", math.inf)
        yield


@contextmanager
def at_length() -> Iterator[None]:
    """Let searches take their whole effort, within the context of brief ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_search, "search", search)
        patch.setattr(vocabulary, "search", search)
        patch.setattr(hill_climbing, "engine", kernels.engine)
        for module in (pairs, vocabulary):
            patch.setattr(module, "search_pairs", _search_pairs)
        patch.setattr(recomputation, "SECONDS", _SECONDS)
        patch.setattr(second_model_orders, "SECONDS", _SECONDS_OF_SECOND)
        yield


def brief_search(
    problem: Problem,
    effort: Effort,
    lower_bound: float,
    known: Sequence[Sequence[Sequence[Pass]]] = (),
    seed: int = 0,
    further: Effort = _NO_EFFORT,
) -> Found:
    """Search as always, with a small part of the effort."""
    effort, further = _least(effort, _MOST), _least(further, _MOST_WALKED)
    return search(problem, effort, lower_bound, known, seed, further)


def brief_search_of_pairs(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Sequence[Schedule]
) -> Schedule:
    """Search as always, with a small part of the effort."""
    return _search_pairs(name, problem, Effort(30, 300), lower_bound, known)


def _least(asked: Effort, most: Effort) -> Effort:
    return Effort(min(asked.runs, most.runs), min(asked.moves, most.moves))
