"""megatron-zb show pipe-bd, as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_zb.cli import main as cli
from megatron_zb.distill.cli import timeline
from megatron_zb.drawing.chart import bars_of, legend_of, text_colour_on, title_of
from megatron_zb.drawing.pictures import draw
from megatron_zb.schedules import PassKind, Timeline

SIZES = ["pipe-bd", "--pipeline-size", "4", "--num-microbatches", "4"]
TIMES = "--teacher 1 1 2 1 --student 3 3 6 3 --update 2 --relay 0.25".split()


def timeline_of(*arguments: str) -> Timeline:
    return timeline(cli.parser().parse_args(["show", *SIZES, *arguments]))


def test_every_pass_is_drawn_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    arguments = [*TIMES, "--distribution", "even", "--steps", "2"]
    assert cli.main(["show", *SIZES, *arguments]) == 0
    printed = capsys.readouterr().out
    built = timeline_of(*arguments)
    bands = re.findall(r"^rank (\d) ([^█\n]*)$", printed, flags=re.MULTILINE)
    for rank, passes in enumerate(built.schedule.ranks):
        row = "".join(text for number, text in bands if number == str(rank))
        letters = []
        for p in passes:
            step = p.microbatch if p.kind is PassKind.U else p.microbatch // 4
            letters.append(p.kind.value if step % 2 == 0 else p.kind.value.lower())
        assert re.findall(r"[A-Za-z]", row) == letters
    shares = re.findall(r"^rank \d █+ ([\d.]+)%$", printed, flags=re.MULTILINE)
    assert [float(share) for share in shares] == [round(100 * s, 1) for s in built.utilisation]
    assert "block 2 on rank 2" in printed
    assert "the slowest takes 35 a step" in " ".join(printed.split())


def test_by_default_the_fastest_distribution_is_drawn() -> None:
    fastest, even = (
        timeline_of(*TIMES, "--reduce", "1", *more) for more in ([], ["--distribution", "even"])
    )
    assert fastest.schedule.placement != even.schedule.placement
    assert fastest.makespan < even.makespan
    report = even.schedule.report
    assert report is not None
    assert report.makespan == even.makespan
    # 5.5 seconds until the activation of microbatch 0 is there, then three steps of 34 and 2
    assert report.lower_bound == 1.25 + 1.25 + 3 * (4 * 8.25 + 2)


def test_ranks_that_gain_nothing_are_left_out() -> None:
    drawn = timeline_of("--blocks", "2", "--reduce", "100")
    assert drawn.schedule.placement.pipeline_size == 2
    assert "2 of 4 ranks would gain nothing" in drawn.schedule.reason


def test_steps_take_turns_with_their_colours() -> None:
    drawn = timeline_of(*TIMES, "--steps", "2")
    colours = {bar.colour for bar in bars_of(drawn)}
    assert len(colours) == 6
    assert {words for _, _, words in legend_of(drawn)} == {
        f"{kind}, {which} steps"
        for kind in ("teacher", "students", "update")
        for which in ("even", "odd")
    }
    assert all(text_colour_on(colour) in ("#000000", "#FFFFFF") for colour in colours)


def test_a_picture_has_a_bar_for_each_pass_and_how_busy_ranks_are(tmp_path: Path) -> None:
    drawn = timeline_of(*TIMES)
    (axes,) = draw(drawn).axes
    assert len(axes.patches) == sum(map(len, drawn.schedule.ranks))
    assert axes.get_title(loc="left") == title_of(drawn)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"rank {r}: {share:.1%}" for r, share in enumerate(drawn.utilisation)]
    path = tmp_path / "pipe-bd.png"
    assert cli.main(["show", *SIZES, *TIMES, "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_trace_has_every_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = ["export", *SIZES, *TIMES, "--format", "chrome-trace", "--output", str(path)]
    assert cli.main(command) == 0
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    drawn = timeline_of(*TIMES)
    assert [e["name"] for e in events] == [str(p) for rank in drawn.schedule.ranks for p in rank]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SIZES, "--forward", "2"], "--forward: pipe-bd does not take it"),
        ([*SIZES, "--memory-limit", "0.5"], "--memory-limit: pipe-bd does not take it"),
        (
            ["v-half", *SIZES[1:], "--run-ahead", "2"],
            "--run-ahead: only pipe-bd takes it, not v-half",
        ),
        ([*SIZES, "--teacher", "1", "2", "--blocks", "3"], "--teacher has 2 times for 3 blocks"),
        (
            [*SIZES, "--teacher", "1", "2", "--student", "1", "2", "3"],
            "--teacher has 2 times for 3 blocks",
        ),
        ([*SIZES, "--distribution", "0-3:5"], "has 4 blocks on 5 ranks: there are 4 blocks and 4"),
        ([*SIZES, "--distribution", "0:3,1-3:1"], "4 microbatches per step cannot be dealt out"),
        ([*SIZES, "--steps", "0"], "0 steps were asked for"),
        ([*SIZES, "--steps", "9999999"], "microbatches on 4 stages are too many"),
        ([*SIZES, "--blocks", "513"], "513 blocks are too many: give at most 512"),
        ([*SIZES, "--output", "x.html"], "there is no page for pipe-bd"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_table_cannot_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", *SIZES, "--format", "csv", "--output", str(tmp_path / "x.csv")]
    assert cli.main(command) == 2
    assert "a csv table has no passes of pipe-bd" in capsys.readouterr().err
