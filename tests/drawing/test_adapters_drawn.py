"""Adapters in drawings: each has its shade of the colours, and its name in the legend."""

from __future__ import annotations

import io
from collections import defaultdict

import pytest
from rich.console import Console

from megatron_zb import schedules
from megatron_zb.cli.main import main
from megatron_zb.drawing.chart import bars_of, legend_of
from megatron_zb.drawing.terminal import print_schedule
from megatron_zb.schedules import PassKind
from megatron_zb.schedules.features.adapters import Adapter, Adapters

ADAPTERS = (Adapter("french", 3, steps=2), Adapter("german", 2), Adapter("dutch", 1, steps=3))


def timeline(update: float) -> schedules.Timeline:
    costs = schedules.Costs.uniform(pipeline_size=2, forward=1, backward=1, weight=0.25)
    adapters = Adapters(ADAPTERS, update=update)
    built = schedules.build("v-zb", pipeline_size=2, adapters=adapters, costs=costs)
    return schedules.simulate(built, costs)


def test_each_adapter_has_one_shade_of_each_kind() -> None:
    line = timeline(update=0.5)
    shades: dict[tuple[PassKind, str], set[str]] = defaultdict(set)
    for bar in bars_of(line):
        rules = line.schedule.rules
        owner = rules.owners[rules.owner_of(bar.microbatch)]
        shades[bar.kind, owner].add(bar.colour)
    assert all(len(colours) == 1 for colours in shades.values())
    for kind in (PassKind.F, PassKind.U):
        assert len({*shades[kind, "french"], *shades[kind, "german"], *shades[kind, "dutch"]}) == 3
    words = [text for kind, _, text in legend_of(line) if kind is PassKind.F]
    assert words == [f"forward, adapter {name}" for name in ("french", "german", "dutch")]


def test_updates_that_take_no_time_are_left_out() -> None:
    for update, drawn in ((0.0, False), (0.5, True)):
        assert any(bar.kind is PassKind.U for bar in bars_of(timeline(update))) is drawn


def test_the_terminal_has_capital_letters_for_every_other_adapter() -> None:
    line, out = timeline(update=0.0), io.StringIO()
    print_schedule(
        line, schedules.Report(line.makespan, line.makespan), Console(file=out, width=400)
    )
    text = out.getvalue()
    assert "capital letter: adapters 0, 2, small: 1, darkest first" in text
    (row,) = [it for it in text.splitlines() if it.startswith("rank 0") and "F0" in it]
    for unit in range(line.schedule.num_microbatches):
        letter = "F" if line.schedule.rules.owner_of(unit) % 2 == 0 else "f"
        assert f"{letter}{unit} " in row


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show 1f1b -p 2 -m 2 --adapter-steps 2", "--adapter-steps is for adapters: give --adap"),
        ("show pipe-bd -p 2 -m 2 --adapters 2", "pipe-bd has no adapters: leave --adapters out"),
        ("show v-zb -p 2 -m 2 --adapters 2 --slices 2", "--adapters cannot be combined with --sl"),
        ("show 1f1b -p 8 -m 512 --adapters 9", "4608 microbatches on 8 ranks are too many"),
        (
            "export v-zb -p 2 -m 2 --adapters 2 --format csv -o -",
            "a csv table of torch has no adapters",
        ),
    ],
)
def test_what_adapters_are_not_drawn_with_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) != 0
    assert said in capsys.readouterr().err
