"""Drawings of a schedule whose output layer is vocabulary parallel: passes O, P and V."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing.chart import bars_of, colour_of, legend_of
from megatron_zb.drawing.pictures import draw
from megatron_zb.schedules import Costs, PassKind, Timeline
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.interchange import write_csv
from megatron_zb.schedules.passes import LAUNCH_LITTLE

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = ["v-half", "--pipeline-size", "4", "--num-microbatches", "8", "--cut-output", "1"]
OWN = [PassKind.O, PassKind.P, PassKind.V]


def timeline() -> Timeline:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    costs = costs.having(Vocabulary(output=2.0, weight=1.0, loss=0.5))
    schedule = schedules.build("v-half", pipeline_size=4, num_microbatches=8, costs=costs)
    return schedules.simulate(schedule, costs)


def test_every_rank_has_its_bars_in_one_shade() -> None:
    one = timeline()
    for rank in range(4):
        for kind in (PassKind.O, PassKind.V):
            bars = [bar for bar in bars_of(one) if (bar.rank, bar.kind) == (rank, kind)]
            assert sorted(bar.microbatch for bar in bars) == list(range(8))
            assert {bar.colour for bar in bars} == {colour_of(kind, 0, 2)}
    words = {kind: text for kind, _, text in legend_of(one) if kind in OWN}
    assert words == {OWN[0]: "logits", OWN[1]: "loss", OWN[2]: "logit weights"}


def test_the_legend_of_a_picture_is_not_cut_off() -> None:
    figure = draw(timeline())
    figure.canvas.draw()
    legends = (*figure.legends, *(axes.get_legend() for axes in figure.axes))
    [legend] = filter(None, legends)
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_show_draws_them_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", *SIZES]) == 0
    printed = capsys.readouterr().out
    for rank in range(4):
        row = "".join(re.findall(rf"rank {rank} (.*[A-Za-z].*)", printed))
        assert [int(number) for number in re.findall(r"O(\d)", row)] == list(range(8))
        assert row.count("V") == 8
    assert re.search(r"^ V +logit weights$", printed, re.MULTILINE)


def test_what_is_exported_is_drawn_and_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, trace = tmp_path / "cut.csv", tmp_path / "cut.json"
    assert cli.main(["export", *SIZES, "--format", "csv", "--output", str(table)]) == 0
    assert cli.main(["show", "--csv", str(table), "--cut-output", "1"]) == 0
    assert "logit weights" in capsys.readouterr().out
    assert cli.main(["show", "--csv", str(table)]) == 2
    assert "give its time, with --cut-output X" in capsys.readouterr().err
    assert cli.main(["export", *SIZES, "--format", "chrome-trace", "--output", str(trace)]) == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event.get("cat") == "V" for event in events) == 4 * 8


def test_a_sharded_embedding_is_read_and_left_out_of_a_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    costs = costs.having(Vocabulary(output=2.0, weight=1.0, lookup=0.0))
    schedule = schedules.build("v-half", pipeline_size=4, num_microbatches=8, costs=costs)
    table = tmp_path / "cut.csv"
    write_csv(schedule, table)
    assert "8E0" in table.read_text(encoding="utf-8")
    assert cli.main(["show", "--csv", str(table), "--cut-output", "1"]) == 0
    assert "logit weights" in capsys.readouterr().out
    drawn = {bar.kind for bar in bars_of(schedules.simulate(schedule, costs))}
    assert drawn.isdisjoint(LAUNCH_LITTLE)
    assert drawn >= set(OWN)


def test_what_has_none_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "pipe-bd", *SIZES[1:]]) == 2
    assert "pipe-bd has no output layer" in capsys.readouterr().err
