"""A kind of pass that the package does not know is searched, checked, timed, lowered, run, drawn.

It stands in one file, with its handler: `tests/support/checkpoint_pass.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import drawn_sizes
import pytest
import torch
from checkpoint_pass import HANDLERS, PART, RAN, N
from ranks import RankPools
from rich.console import Console
from toy_layers import empty_message, layers_of_a_rank

from megatron_zb import schedules
from megatron_zb.drawing.chart import bars_of, legend_of
from megatron_zb.drawing.terminal import print_schedule
from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import run_program
from megatron_zb.schedules import interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.kinds import Home
from megatron_zb.schedules.lowering import lower, runs_of, unfinished
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule

pytestmark = pytest.mark.usefixtures("brief_searches")

P, M = 4, 6
PLAIN = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0, p2p=0.05)
COSTS = PLAIN.having(PART)


def built(name: str, costs: Costs = COSTS) -> Schedule:
    return schedules.build(name, pipeline_size=P, num_microbatches=M, costs=costs)


@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "auto"])
def test_every_schedule_has_its_passes_and_takes_their_time(name: str) -> None:
    schedule = built(name)
    kinds = Counter(p.kind for rank in schedule.ranks for p in rank)
    assert kinds[N] == kinds[PassKind.F] == M * schedule.placement.num_stages
    with_part = schedules.simulate(schedule, COSTS)
    for rank, passes in enumerate(schedule.ranks):
        held = 0.0
        for p, (_, after) in zip(passes, with_part.memory_steps(rank), strict=True):
            held += schedule.memory_change(p, with_part.costs)
            assert after == pytest.approx(held)
        assert held == pytest.approx(0.0), "B frees what N has taken"
        times = zip(passes, with_part.start[rank], with_part.end[rank], strict=True)
        spent = sum(end - start for p, start, end in times if p.kind is N)
        assert spent == pytest.approx(M * PART.seconds)


LENGTHS = (1.0, 2.0, 0.5, 1.5, 1.0, 3.0)
# A schedule and a memory limit under which the other kind has passes, and the costs that ask for it
OTHERS: dict[str, tuple[str, float | None, Callable[[Costs], Costs]]] = {
    "pairs": ("v-half", None, lambda c: c.having(Communication(forward=0.4, backward=0.4))),
    "recomputation": ("v-half", 0.5, lambda c: c.having(Recomputation(kept_input=0.05))),
    "vocabulary": ("zb-h1", None, lambda c: c.having(Vocabulary(output=1.0, weight=0.5))),
    "lengths": ("v-zb", None, lambda c: c.of_lengths(LENGTHS)),
    "offload": ("v-half", 0.5, lambda c: c.having(Offload(seconds=0.1))),
}


@pytest.mark.parametrize("other", drawn_sizes.first(4, [*OTHERS]))
def test_it_stands_beside_every_other_kind(other: str) -> None:
    name, limit, asking = OTHERS[other]
    part = replace(PART, memory=0.0) if limit else PART
    p = 2 if limit else P  # a search for states takes seconds
    without = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0, p2p=0.05)
    costs = asking(without.having(part))
    plain, schedule = (
        schedules.build(name, pipeline_size=p, num_microbatches=M, costs=c, memory_limit=limit)
        for c in (asking(without), costs)
    )
    kinds = Counter(p.kind for rank in schedule.ranks for p in rank)
    number = {
        "pairs": len(schedule.pairs),
        "recomputation": kinds[PassKind.R],
        "offload": kinds[PassKind.D],
        "vocabulary": kinds[PassKind.O],
        "lengths": len(costs.microbatches),
    }
    assert number[other] > 0
    assert kinds[N] == kinds[PassKind.F] == M * schedule.placement.num_stages
    assert unfinished(lower(schedule)) == {}
    timeline = schedules.simulate(schedule, costs)
    assert timeline.makespan > schedules.simulate(plain, asking(without)).makespan
    units = sum(LENGTHS) if other == "lengths" else M
    for passes, starts, ends in zip(schedule.ranks, timeline.start, timeline.end, strict=True):
        times = zip(passes, starts, ends, strict=True)
        assert sum(end - start for p, start, end in times if p.kind is N) == pytest.approx(
            units * PART.seconds
        )


def test_a_search_counts_a_part_with_the_pass_that_it_follows() -> None:
    folded = PART.folded(COSTS)
    assert folded.features == ()
    seconds = (sum(of.seconds[PART.follows]) for of in (folded, PLAIN))
    memory = (sum(of.memory["activation"]) for of in (folded, PLAIN))
    for (after, before), more in ((seconds, PART.seconds), (memory, PART.memory)):
        assert after - before == pytest.approx(P * more) and more > 0


def test_a_part_takes_nothing_unless_it_says_so() -> None:
    free = Part(PART.kind)
    assert (free.seconds, free.memory, free.until) == (0.0, 0.0, None)
    schedule = built("zb-h1", PLAIN.having(free))
    assert schedules.simulate(schedule, PLAIN).makespan == pytest.approx(
        schedules.simulate(built("zb-h1", PLAIN), PLAIN).makespan
    )


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_a_part_stands_on_the_stages_of_its_home(name: str) -> None:
    last = replace(PART, kind=replace(PART.kind, home=Home.LAST), memory=0.0, until=None)
    schedule = built(name, PLAIN.having(last))
    stages = [p.stage for rank in schedule.ranks for p in rank if p.kind is N]
    assert stages == [schedule.placement.num_stages - 1] * M
    assert schedules.simulate(schedule, PLAIN.having(last)).makespan > 0


def test_the_letter_of_another_kind_is_refused() -> None:
    assert PassKind.add("N", N.words) is N
    with pytest.raises(ValueError, match="'N' is checkpoint: give a letter other than F B W"):
        PassKind.add("N", "next")


@pytest.mark.parametrize("other", ["recomputation", "offload"])
def test_memory_that_nothing_frees_is_refused_before_a_search(other: str) -> None:
    name, limit, asking = OTHERS[other]
    with pytest.raises(UsageError, match="passes N hold memory that neither recomputation nor"):
        schedules.build(
            name, pipeline_size=P, num_microbatches=M, costs=asking(COSTS), memory_limit=limit
        )


def test_a_wrong_place_is_refused() -> None:
    schedule = built("zb-h1")
    first = schedule.ranks[0]
    assert [p.kind for p in first[:2]] == [PassKind.F, N]
    ranks = ((first[1], first[0], *first[2:]), *schedule.ranks[1:])
    with pytest.raises(InvalidSchedule, match=r"pass 0N0: rule 'order': its F has not run yet"):
        replace(schedule, ranks=ranks).validate()
    ranks = ((first[0], *first[2:]), *schedule.ranks[1:])
    with pytest.raises(InvalidSchedule, match="rule 'microbatch order': the next N of stage 0"):
        replace(schedule, ranks=ranks).validate()


def test_it_is_lowered_drawn_and_exported() -> None:
    schedule = built("v-half")
    program = lower(schedule)
    assert unfinished(program) == {}
    assert sum(run.work.kind is N for rank in program.ranks for run in runs_of(rank)) == 2 * P * M
    timeline = schedules.simulate(schedule, COSTS)
    assert sum(bar.kind is N for bar in bars_of(timeline)) == 2 * P * M
    assert "checkpoint, chunk 0" in [words for _, _, words in legend_of(timeline)]
    assert schedule.report is not None
    console = Console(record=True, width=160, file=StringIO())
    print_schedule(timeline, schedule.report, console)
    assert "checkpoint" in console.export_text()
    assert "0N0" in interchange.to_csv(schedule)


def gradients(handlers: bool) -> dict[int, torch.Tensor]:
    schedule = built("v-half") if handlers else built("v-half", PLAIN)
    channels = Channels(list(range(P)), schedule.placement, "cpu")
    layers, stages = layers_of_a_rank(schedule.placement)
    RAN.clear()
    rank = torch.distributed.get_rank()
    if handlers:
        program = lower(schedule)
        run_program(program, rank, stages, channels, empty_message, handlers=HANDLERS)
        assert len(RAN) == 2 * M
    else:
        run_program(lower(schedule), rank, stages, channels, empty_message)
    channels.close()
    return {stage: layer.gradient for stage, layer in layers.items()}


def test_it_runs_and_leaves_every_bit_as_it_is(ranks: RankPools) -> None:
    found, plain = (ranks(P).run(gradients, handlers=handlers) for handlers in (True, False))
    for with_part, without in zip(found, plain, strict=True):
        for stage, gradient in with_part.items():
            assert torch.equal(gradient, without[stage])
