"""The picture of a distillation's last steps, and the bar of those that are done."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import RankPools
from small_relay import Block, BlockStage, M, empty

from megatron_zb.distill import last_steps
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.last_steps import LastSteps
from megatron_zb.distill.relay_steps import Exchange, relay_steps
from megatron_zb.distill.report import StepBar
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.relay import Relay
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.runtime.channels import Channels, new_groups
from megatron_zb.runtime.observer import Observers
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.simulator import Timeline


def drawn_on_ranks(path: str) -> Timeline | None:
    """The timeline of the picture of a small relay's last steps, on the first rank."""
    found: list[Timeline] = []
    distribution, rank = Distribution.of([(1, 1), (2, 1)]), dist.get_rank()
    channels = Channels(range(2), distribution.placement, "cpu")
    [group] = new_groups([[rank]])
    stage = BlockStage([Block(number) for number in range(rank + 1)], group, rank == 1)
    last = LastSteps(False, M, 1)
    exchange = Exchange(channels, empty, Observers([last]))
    for step in relay_steps(step_by_step(distribution, M), rank, stage, exchange, first=0, until=5):
        last.before(step + 1, 5)
    channels.close()
    with mock.patch.object(last_steps, "save_picture", lambda timeline, *_: found.append(timeline)):
        last.draw(distribution, Lanes(), Path(path))
    return found[0] if found else None


def test_a_picture_has_every_pass_of_the_last_steps(ranks: RankPools, tmp_path: Path) -> None:
    """In the order in which they ran: a stage's teacher after that of the stage before."""
    timeline, nothing = ranks(2).run(drawn_on_ranks, path=str(tmp_path / "a.png"))
    assert nothing is None
    schedule = timeline.schedule.validate()
    assert isinstance(schedule.rules, Relay)
    assert schedule.rules.steps == last_steps.STEPS
    times = {
        p: span
        for passes, *spans in zip(schedule.ranks, timeline.start, timeline.end, strict=True)
        for p, span in zip(passes, zip(*spans, strict=True), strict=True)
    }
    assert min(start for start, _ in times.values()) == 0.0
    for p, (start, end) in times.items():
        assert start <= end
        if p.kind is PassKind.T and p.stage == 1:
            assert start >= times[p._replace(stage=0)][1]


def test_a_bar_shows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    bar = StepBar(2, 8)
    bar.update(completed=5)
    (task,) = bar._progress.tasks
    assert (task.completed, task.total) == (5, 8)
    bar.say("a line [with brackets]")
    bar.close()
    assert "a line [with brackets]" in capsys.readouterr().out
