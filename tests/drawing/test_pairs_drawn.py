"""Pairs in drawings: one block with the names of both passes, in the terminal and in pictures."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from pages import page_of
from rich.console import Console

from megatron_zb import schedules
from megatron_zb.cli.main import main
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import COST_UNIT, bars_of
from megatron_zb.drawing.html_drawing import SIZES
from megatron_zb.drawing.pictures import save_picture
from megatron_zb.drawing.terminal import print_schedule
from megatron_zb.schedules.families import dualpipe_v_order
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.interchange import write_csv


def timeline() -> schedules.Timeline:
    costs = schedules.Costs.uniform(pipeline_size=2, forward=1, backward=1, weight=1)
    costs = costs.having(Communication(forward=0.5, backward=0.5))
    return schedules.simulate(dualpipe_v_order(2, 5), costs)


def test_the_bars_of_a_pair_share_its_time() -> None:
    line = timeline()
    halves = [bar for bar in bars_of(line) if bar.half is not None]
    assert len(halves) == 2 * len(line.schedule.pairs)
    for forward, backward in zip(halves[::2], halves[1::2], strict=True):
        assert (forward.half, backward.half) == (0, 1)
        assert (forward.kind.value, backward.kind.value) == ("F", "BW")
        assert (forward.start, forward.end) == (backward.start, backward.end)


def test_the_terminal_draws_a_pair_as_one_block_with_both_names() -> None:
    line, out = timeline(), io.StringIO()
    report = schedules.Report(line.makespan, line.makespan)
    print_schedule(line, report, Console(file=out, width=200))
    text = out.getvalue()
    paired = [
        line.schedule.pair_at(rank, i)
        for rank, passes in enumerate(line.schedule.ranks)
        for i in range(len(passes))
    ]
    pairs = [pair for pair in paired if pair is not None]
    assert pairs
    rows = [row for row in text.splitlines() if row.startswith("rank") and "F0" in row]
    for forward, backward in pairs:
        letters = [
            letter.upper() if line.schedule.placement.chunk_of(p.stage) == 0 else letter.lower()
            for letter, p in (("F", forward), ("D", backward))
        ]
        block = f"{letters[0]}{forward.microbatch}+{letters[1]}{backward.microbatch}"
        assert any(block in row.replace(" ", "") for row in rows), block
    assert "+ joins a pair" in text


def test_a_picture_draws_both_halves_of_a_pair(tmp_path: Path) -> None:
    line = timeline()
    apart = schedules.simulate(line.schedule.without_pairs(), _AsCosts(line))
    for name, drawn in (("pairs", line), ("apart", apart)):
        save_picture(drawn, tmp_path / f"{name}.svg")
    pictures = [(tmp_path / f"{name}.svg").read_text() for name in ("pairs", "apart")]
    assert pictures[0] != pictures[1]


class _AsCosts:
    """The costs of a timeline, for any schedule of its placement."""

    def __init__(self, line: schedules.Timeline) -> None:
        self._costs = line.costs

    def for_placement(self, placement: object) -> schedules.costs.StageCosts:
        return self._costs


def test_an_order_keeps_its_pairs_as_text() -> None:
    order = dualpipe_v_order(2, 5)
    again = html_drawing.decode_order(html_drawing.encode_order(order))
    assert (again.ranks, again.pairs) == (order.ranks, order.pairs)
    assert "pairs" not in html_drawing.encode_order(order.without_pairs())


def test_a_page_draws_the_two_passes_of_a_pair_above_each_other() -> None:
    line = timeline()
    svg = str(html_drawing.draw(line, "pairs", COST_UNIT))
    of_kind = {
        kind: re.findall(r"M[\d.]+,([\d.]+)h[\d.]+v([\d.]+)", " ".join(paths))
        for kind in ("F", "BW")
        if (paths := re.findall(f'data-kind="{kind}" [^>]* d="([^"]+)"', svg))
    }
    half, gap = SIZES.bar / 2, (SIZES.row - SIZES.bar) / 2
    for kind, bars in of_kind.items():
        paired = [float(y) % SIZES.row for y, height in bars if float(height) == half]
        assert len(paired) == len(line.schedule.pairs)
        assert set(paired) == {gap if kind == "F" else gap + half}
    assert set(of_kind) == {"F", "BW"}


def test_show_draws_torchs_table_and_times_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(dualpipe_v_order(2, 5), tmp_path / "table.csv")
    times = ["--forward-comm", "0.5", "--backward-comm", "0.5"]
    assert main(["show", "--csv", str(tmp_path / "table.csv"), *times]) == 0
    out = capsys.readouterr().out
    assert "+ joins a pair" in out and f"makespan {timeline().makespan:.6g}" in out
    page = ["--output", str(tmp_path / "page.html")]
    assert main(["show", "--csv", str(tmp_path / "table.csv"), *times, *page]) == 0
    data = page_of(tmp_path / "page.html").one("div", data_picture="").one("script").text
    assert json.loads(data)["order"] == html_drawing.encode_order(timeline().schedule) | {
        "name": json.loads(data)["order"]["name"]
    }
    idle = 1 - timeline().utilisation[0]
    assert f"{idle:.1%}" in page_of(tmp_path / "page.html").text
