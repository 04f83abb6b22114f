"""The search's inner loops: compiled and plain Python agree, and what they find keeps the rules."""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.placement import v_shape
from megatron_zb.schedules.search import hill_climbing, runner
from megatron_zb.schedules.search.inner_loops import INFINITY
from megatron_zb.schedules.search.kernels import (
    Compiled,
    Engine,
    Plain,
    available,
    forget_unreadable,
)
from megatron_zb.schedules.search.priority_weights import PRESETS, PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Effort, Runner

_P, _M = 4, 8
_COSTS = schedules.Costs.uniform(pipeline_size=_P, forward=1.0, backward=1.21, weight=0.83, p2p=0.1)


def _problem(microbatches: float = 2.5) -> Problem:
    """The V under a limit in microbatches of a whole rank."""
    placement = v_shape(_P)
    table = _COSTS.for_placement(placement)
    stages = placement.stages_of[0]
    limit = microbatches * sum(table.memory["activation"][s] for s in stages)
    return Problem(placement, _M, table, (limit,) * _P)


def _biased(seed: int) -> PriorityWeights:
    rng = random.Random(seed)
    weights = PriorityWeights.from_preset(PRESETS[seed], 2, _P)
    for _ in range(5):
        weights = weights.with_other_biases(rng, 2, _P).changed(rng, 2, _P)
    return weights


@pytest.mark.parametrize("split", [True, False])
def test_a_bound_ends_slower_runs_and_no_others(split: bool) -> None:
    runner = Runner(replace(_problem(), split=split), Plain())
    found = [runner.makespan(_biased(seed)) for seed in range(8)]
    assert len(set(found)) > 3
    for bound in found:
        for seed, makespan in enumerate(found):
            expected = makespan if makespan <= bound else INFINITY
            # a run that is slower only at its very end is not always seen to be
            assert runner.makespan(_biased(seed), bound) in (expected, makespan)
    slowest, fastest = found.index(max(found)), min(found)
    assert runner.makespan(_biased(slowest), 0.9 * fastest) == INFINITY


@pytest.mark.skipif(not available(), reason="numba is not installed")
@pytest.mark.parametrize("mean_weight", [0.0, 100.0])
def test_compiled_and_plain_loops_agree_to_the_last_bit(mean_weight: float) -> None:
    def results(engine: Engine) -> list[tuple[float, float, list[int]]]:
        runner = Runner(_problem(), engine)
        found = []
        for seed in range(3):
            makespan = runner.makespan(_biased(seed))
            order = runner.copied()
            polished, best = runner.polished(order, 300, 1.0, 0.0, seed, mean_weight)
            found.append((makespan, polished, [int(code) for code in best[0]]))
        return found

    assert results(Plain()) == results(Compiled())


def test_a_bias_for_w_runs_it_right_after_its_backward() -> None:
    runner = Runner(_problem(), Plain())
    weights = PriorityWeights.from_preset(PRESETS[0], 2, _P)
    plain = (runner.makespan(weights), runner.copied())
    bias = [0.0] * len(weights.rank_bias)
    assert (runner.makespan(_with(weights, bias)), runner.copied()) == plain
    bias[2 * 5 + 4] = -1000.0
    runner.makespan(_with(weights, bias))
    ranks = runner.passes(runner.copied())
    kinds = "".join(p.kind.value for p in ranks[2])
    assert kinds.count("BW") == kinds.count("W") == 2 * _M


def _with(weights: PriorityWeights, bias: list[float]) -> PriorityWeights:
    return replace(weights, rank_bias=tuple(bias))


def test_walks_keep_the_limit_and_never_lose() -> None:
    problem = _problem()
    bound = lower_bound(problem.placement, _M, problem.costs, problem.limit)
    without = hill_climbing.search(problem, Effort(20, 200), bound)
    walked = hill_climbing.search(problem, Effort(20, 200), bound, further=Effort(40, 400))
    assert without.makespan > bound * 1.01  # or there would be no walk
    assert walked.makespan <= without.makespan
    assert walked == hill_climbing.search(problem, Effort(20, 200), bound, further=Effort(40, 400))
    schedule = schedules.Schedule("walked", problem.placement, _M, walked.ranks)
    schedule.validate()
    timeline = schedules.simulate(schedule, _COSTS)
    assert timeline.makespan == pytest.approx(walked.makespan)
    assert max(timeline.peak_memory) <= problem.limit[0] * (1 + 1e-9)


def test_what_another_version_has_compiled_is_in_nobodys_way(tmp_path: Path) -> None:
    """Its index may name classes that are not there any more."""
    line, python = _problem.__code__.co_firstlineno, "py{}{}".format(*sys.version_info)
    bodies = {
        "good": pickle.dumps(("stamp", {})),
        "renamed": b"cmegatron_zb.schedules.search.runner\nNoSuchClass\n.",
        "damaged": pickle.dumps(("stamp", {}))[:-4],
        "empty": b"",
    }
    for name, body in bodies.items():
        index = tmp_path / f"{name}._problem-{line}.{python}.nbi"
        index.write_bytes(pickle.dumps("0.1") + body)
    forget_unreadable(tmp_path, _problem)
    assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == ["good"]


def test_the_numbers_of_a_preset_have_their_places() -> None:
    weights = PriorityWeights.from_preset(list(range(20)), 2, _P)
    named = ("quota", "quota_slope", "early", "pending", "pending_share")
    assert [getattr(weights, name) for name in named] == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_earlier_chunks_have_a_larger_share_of_a_quota(chunks: int) -> None:
    portions = [runner._portion(chunk, chunks) for chunk in range(chunks)]
    if chunks <= 2:
        assert portions == [1.0] * chunks
        return
    assert portions == sorted(portions, reverse=True)
    assert sum(portions) == pytest.approx(chunks**2 / (chunks**2 - 1))


@pytest.mark.parametrize("pace", [runner.SINGLE, runner.RESTARTS, runner.RECOMPUTE, runner.PAIRS])
def test_effort_grows_with_seconds_up_to_what_is_useful(
    pace: runner.Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "available", lambda: True)
    problem = _problem()
    assert runner.effort_of(problem, 1e6, pace) == pace.most
    assert pace.most.moves > pace.most.runs, "a run orders all passes, a move changes one"
    some, twice = (runner.effort_of(problem, seconds, pace) for seconds in (0.01, 0.02))
    assert 0 < 2 * some.runs <= twice.runs <= 2 * some.runs + 1 < pace.most.runs
    assert 0 < 2 * some.moves <= twice.moves <= 2 * some.moves + 1
    assert runner.effort_of(problem, 1e6, pace, Effort(7, 9)) == Effort(7, 9)
    monkeypatch.setattr(runner, "available", lambda: False)
    assert runner.effort_of(problem, 1e6, pace) == Effort(100, 0)
    slower = runner.effort_of(problem, 0.02, pace)
    assert 0 < slower.runs < twice.runs / 5
    assert slower.moves == 0


def test_neighbours_move_quotas_of_a_range_of_ranks_by_one_or_two_either_way() -> None:
    """The last chunk of each rank has no quota to move."""
    weights, rng = PriorityWeights.from_preset(PRESETS[0], 2, _P), random.Random(3)
    shifts = {weights.changed(rng, 2, _P).shift for _ in range(2000)} - {weights.shift}
    steps = {step for shift in shifts for step in shift if step}
    assert steps == {-2, -1, 1, 2}
    for shift in shifts:
        assert not any(shift[1::2])
        moved = [rank for rank, step in enumerate(shift[0::2]) if step]
        assert moved == list(range(moved[0], moved[-1] + 1))
        assert len({shift[2 * rank] for rank in moved}) == 1


def test_a_rank_that_holds_nothing_has_no_quota() -> None:
    """Its memory is no reason to run fewer microbatches at once."""
    uneven = replace(_COSTS, memory=dict.fromkeys(_COSTS.memory, (0.0, 1.0, 1.0, 1.0)))
    table = uneven.for_placement(v_shape(_P))
    nothing = dict.fromkeys(v_shape(_P).stages_of[0], 0.0)
    held = tuple(nothing.get(s, x) for s, x in enumerate(table.memory["activation"]))
    table = replace(table, memory=dict.fromkeys(table.memory, held))
    problem = Problem(v_shape(_P), _M, table, (2.5,) * _P)
    found = hill_climbing.search(problem, Effort(20, 200), 0.0, [])
    assert sum(map(len, found.ranks)) == 3 * 2 * _P * _M
