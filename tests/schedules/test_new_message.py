"""A kind of pass that sends a message to the next rank is a file, and runs in a real job.

`tests/support/checksum_pass.py` has what schedules and steps need of it. Here it is built by every
family, validated, timed, lowered, written as a table, read from it, drawn, exported, and trained
with Megatron's GPT on ranks that get the table of rank 0.
"""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import gpt_cases
import pytest
import torch
from brief_searches import briefly
from checksum_pass import PART, C, ChecksumPart, gradients_of
from gpt_cases import GPTCase
from ranks import RankPools
from rich.console import Console
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb import schedules
from megatron_zb.drawing.chart import bars_of, legend_of
from megatron_zb.drawing.terminal import print_schedule
from megatron_zb.errors import UsageError
from megatron_zb.job.shared_build import SharedBuild
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.lowering import PostReceive, lower, unfinished
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule

pytestmark = pytest.mark.usefixtures("brief_searches")

P, M = 4, 6
COSTS = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0, p2p=0.05).having(PART)


def built(name: str, **given: Any) -> Schedule:
    sizes: dict[str, Any] = {"pipeline_size": P, "num_microbatches": M, "costs": COSTS}
    sizes |= given
    return schedules.build(name, **sizes)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_has_its_passes_and_messages(name: str) -> None:
    schedule = built(name)
    stages = schedule.placement.num_stages
    kinds = Counter(p.kind for rank in schedule.ranks for p in rank)
    assert kinds[C] == kinds[PassKind.F] == M * stages
    program = lower(schedule.validate())
    assert unfinished(program) == {}
    sent = [
        at.message
        for rank in program.ranks
        for at in rank
        if isinstance(at, PostReceive) and at.message.made_by is C
    ]
    rank_of = schedule.placement.rank_of
    crossing = [s for s in range(stages - 1) if rank_of[s] != rank_of[s + 1]]
    assert sorted((it.stage, it.microbatch) for it in sent) == sorted(
        (s, j) for s in crossing for j in range(M)
    )
    timeline = schedules.simulate(schedule, COSTS)
    for rank, passes in enumerate(schedule.ranks):
        times = zip(passes, timeline.start[rank], timeline.end[rank], strict=True)
        spent = sum(end - start for p, start, end in times if p.kind is C)
        assert spent == pytest.approx(M * PART.seconds)
    ends = {
        p: end
        for rank, passes in enumerate(schedule.ranks)
        for p, end in zip(passes, timeline.end[rank], strict=True)
    }
    starts = {
        p: start
        for rank, passes in enumerate(schedule.ranks)
        for p, start in zip(passes, timeline.start[rank], strict=True)
    }
    for p, start in starts.items():
        if p.kind is C and p.stage + 1 < stages:
            late = 0.05 if rank_of[p.stage] != rank_of[p.stage + 1] else 0.0
            assert start >= ends[p._replace(stage=p.stage + 1)] + late - 1e-9


def test_it_stands_beside_recomputation() -> None:
    costs = COSTS.having(Recomputation(kept_input=0.05))
    schedule = built("v-half", costs=costs, memory_limit=0.5)
    assert schedule.recomputed
    assert unfinished(lower(schedule.validate())) == {}


def test_wrong_places_are_refused() -> None:
    """C before its W; and C of rank 0 before an F that the C of rank 1 stands behind."""
    last = "1F0,1I0,1W0,1F1,1I1,1W1,1C0,1C1"
    early = f"0F0,0I0,0C0,0W0,0F1,0I1,0W1,0C1\n{last}"
    with pytest.raises(InvalidSchedule, match="pass 0C0: rule 'order': its W has not run yet"):
        interchange.from_csv(early, parts=[PART])
    with pytest.raises(InvalidSchedule, match="rule 'progress': the ranks wait for one another"):
        interchange.from_csv(early.replace("0C0,0W0", "0W0,0C0"), parts=[PART])
    late = early.replace("0C0,0W0", "0W0").replace("0W1,0C1", "0W1,0C0,0C1")
    assert interchange.from_csv(late, parts=[PART]).num_microbatches == 2


def test_its_table_is_read_where_the_kind_is_given() -> None:
    schedule = built("v-half")
    table = interchange.to_csv(schedule)
    assert "0C0" in table
    again = interchange.from_csv(table, parts=[PART])
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)
    with pytest.raises(UsageError, match=r"'\dC0' is no pass"):
        interchange.from_csv(table)
    request = {"costs": COSTS}
    assert catalog.from_table("v-half", table, request).ranks == schedule.ranks


def test_it_is_drawn_and_exported() -> None:
    schedule = built("v-half")
    timeline = schedules.simulate(schedule, COSTS)
    assert sum(bar.kind is C for bar in bars_of(timeline)) == 2 * P * M
    assert "checksum, chunk 0" in [words for _, _, words in legend_of(timeline)]
    assert schedule.report is not None
    console = Console(record=True, width=160, file=StringIO())
    print_schedule(timeline, schedule.report, console)
    assert "checksum" in console.export_text()
    assert '"0C0"' in interchange.to_chrome_trace(timeline)


CASE = GPTCase(layers=8)


def trained(name: str) -> tuple[list[bool], dict[int, float], float, list[float]]:
    """What one rank of a job finds: its schedule is that of rank 0, whose table was sent.

    Whether every gradient is that without checksums, the checksums, the sum of this rank's
    gradients, and its losses.
    """
    with briefly():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store = PrefixStore(f"checksums of {name}", _get_default_store())
        build = SharedBuild(lambda: store, rank, count)
        schedule = build(name, pipeline_size=P, num_microbatches=M, costs=COSTS)
        plain = gpt_cases.run(CASE, name, [M])[M]
        with gpt_cases.built(CASE, schedule, M) as (adapter, chunks):
            assert adapter is not None
            checksums = ChecksumPart()
            adapter.forward_backward_func.add(checksums)
            gpt_cases._zero_gradients(chunks)
            data = [gpt_cases.microbatches(CASE, M) for _ in chunks]
            records = gpt_cases.forward_backward(adapter.forward_backward_func, chunks, data, M)
            found = dict(gpt_cases.gradients(chunks))
            equal = [torch.equal(found[key], of) for key, of in plain.gradients.items()]
            own = sum(float(gradients_of(chunk.parameters())) for chunk in chunks)
    losses = [float(record["lm loss"]) for record in records]
    assert losses == plain.losses
    return equal, checksums.found, own, losses


@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_ranks_train_by_the_table_of_rank_0(ranks: RankPools, name: str) -> None:
    outcomes = ranks(P).run(trained, name=name)
    assert all(equal and all(equal) for equal, _, _, _ in outcomes)
    (found,) = [of_rank for _, of_rank, _, _ in outcomes if of_rank]
    assert sorted(found) == [*range(M)]
    whole = sum(own for _, _, own, _ in outcomes)
    assert found[M - 1] == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert len({round(value, 9) for value in found.values()}) == M
