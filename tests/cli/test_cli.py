"""The command megatron-zb, as a user meets it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zb import __version__, schedules
from megatron_zb.cli import main as cli

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = ["--pipeline-size", "4", "--num-microbatches", "8"]


@pytest.mark.parametrize("name", schedules.names())
def test_show_draws_every_pass_in_order(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert cli.main(["show", name, *SIZES]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[1:])) <= 90
    schedule = schedules.build(name, pipeline_size=4, num_microbatches=8)
    letters = {"F": "F", "B": "B", "W": "W", "BW": "D"}
    for rank, passes in enumerate(schedule.ranks):
        bands = re.findall(rf"^rank {rank} (.*)$", printed, flags=re.MULTILINE)
        expected = []
        for p in passes:
            letter = letters[p.kind.value]
            is_even = schedule.placement.chunk_of(p.stage) % 2 == 0
            expected.append(f"{letter if is_even else letter.lower()}{p.microbatch}")
        assert re.findall(r"[A-Za-z]\d*", "".join(bands)) == expected


@pytest.mark.parametrize("name", ["1f1b", "v-half", "gpipe"])
def test_show_draws_the_memory_of_each_rank(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["show", name, *SIZES]) == 0
    printed = capsys.readouterr().out
    built = schedules.build(name, pipeline_size=4, num_microbatches=8)
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    peaks = schedules.simulate(built, costs).peak_memory
    rows = re.findall(r"^rank (\d) ([ ▁▂▃▄▅▆▇█]+) ([\d.]+)( ◀)?$", printed, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
    assert [float(row[2]) for row in rows] == pytest.approx(peaks)
    assert [bool(row[3]) for row in rows].index(True) == peaks.index(max(peaks))
    assert len({len(row[1]) for row in rows}) == 1
    top = max(4, *peaks)
    levels = [max(" ▁▂▃▄▅▆▇█".index(mark) for mark in row[1]) for row in rows]
    assert levels == [math.ceil(peak / top * 8) for peak in peaks]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1f1b"], "\nnumber: microbatch"),
        (["v-half"], "\ncapital letter: chunk 0, small: 1; number"),
        (["interleaved", "--chunks", "3"], "letter: chunks 0, 2, small: 1, darkest first"),
        (["wave"], "letter: chunks 0, 2, small: 1, 3, darkest first"),
    ],
)
def test_the_legend_tells_the_letters_of_all_chunks(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", *arguments, *SIZES]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("name", "differ"), [("v-half", True), ("zb-h1", False)])
def test_show_says_which_ranks_of_a_job_those_of_a_v_are(
    name: str, differ: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", name, "-p", "4", "-m", "8"]) == 0
    said = "in a job, ranks 0 to 3 of this drawing are Megatron's pipeline ranks 3 to 0\n"
    assert (said in capsys.readouterr().out) is differ


def test_show_tells_the_distance_to_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "1f1b", *SIZES]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # lines may be broken anywhere
    report = schedules.build("1f1b", pipeline_size=4, num_microbatches=8).report
    assert report is not None
    assert f"makespan 33, lower bound {report.lower_bound:g} " in printed
    assert f"at most {report.gap:.1%} left to gain" in printed
    assert cli.main(["show", "v-half", *SIZES]) == 0
    assert "nothing left to gain" in " ".join(capsys.readouterr().out.split())


def test_auto_tells_why_and_keeps_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "auto", *SIZES, "--memory-limit", "0.5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "is the fastest that fits" in printed
    share = re.search(r"\(([\d.]+) of 1F1B's\)", printed)
    assert share is not None
    assert float(share.group(1)) <= 0.5


def test_chunks_and_groups_are_the_users_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "interleaved", *SIZES, "--chunks", "4"]) == 0
    assert "bubble rate 8.6%" in capsys.readouterr().out  # 3 * 3 / 4 of 24 + 3 * 3 / 4
    chosen = ["--chunks", "3", "--group-size", "8"]
    assert cli.main(["show", "interleaved", *SIZES, *chosen]) == 0
    built = schedules.build(
        "interleaved", pipeline_size=4, num_microbatches=8, chunks=3, group_size=8
    )
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    timeline = schedules.simulate(built, costs)
    assert f"bubble rate {timeline.bubble_rate:.1%}" in capsys.readouterr().out


def test_show_never_prints_part_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A short pass has room for its letter alone."""
    assert cli.main(["show", "zb-h1", "-p", "2", "-m", "12", "--weight", "0.3"]) == 0
    printed = capsys.readouterr().out
    assert "W1" not in printed
    assert "F11" in printed


@pytest.mark.parametrize("cost", ["--backward", "--p2p"])
def test_show_draws_no_wider_where_few_passes_take_nearly_all_the_time(
    cost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many columns as seconds would be gigabytes of them."""
    assert cli.main(["show", "zb-h1", "-p", "2", "-m", "4", cost, "99999999"]) == 0
    assert len(capsys.readouterr().out) < 10_000


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_show_writes_a_picture(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"schedule.{ending}"
    assert cli.main(["show", "v-half", *SIZES, "--output", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_a_long_drawing_is_shortened_in_the_middle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out is said, and nothing else is left out; the bars of the end are whole."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["show", "1f1b", "-p", "2", "-m", "900"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 300
    found = re.search(r"\.\.\. (\d+) microbatches, (\d+) to (\d+), are left out", printed)
    assert found is not None
    count, first, last = map(int, found.groups())
    assert count == last - first + 1
    drawn = {int(number) for number in re.findall(r"[FD](\d+)", printed)}
    assert drawn == set(range(900)) - set(range(first, last + 1))
    assert printed.index(f"F{first - 1}") < found.start() < printed.index(f"D{last + 1}")
    assert "F899" in printed


def test_a_drawing_with_room_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "zb-h1", "-p", "4", "-m", "64"]) == 0
    printed = capsys.readouterr().out
    assert "left out" not in printed
    assert {int(number) for number in re.findall(r"F(\d+)", printed)} == set(range(64))


def test_costs_change_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    def bubble(*costs: str) -> float:
        assert cli.main(["show", "1f1b", *SIZES, *costs]) == 0
        found = re.search(r"bubble rate ([\d.]+)%", capsys.readouterr().out)
        assert found is not None
        return float(found.group(1))

    assert bubble() == pytest.approx(100 * 3 / 11, abs=0.06)
    assert bubble("--p2p", "1") > bubble()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "v-halv", *SIZES], "unknown pipeline schedule 'v-halv'"),
        (["show", "v-half", "-p", "1", "-m", "8"], "pipeline size 1"),
        (["show", "v-half", *SIZES, "--forward", "-1"], "forward"),
        (["show", "v-half", *SIZES, "--output", "x.pdf"], "cannot draw into 'x.pdf'"),
        (["show", "v-half", *SIZES, "--chunks", "4"], "v-half has no choice of chunks"),
        (["show", "v-half", *SIZES, "--group-size", "4"], "v-half has no choice of group_size"),
        (
            ["show", "v-half", *SIZES, "--memory-limit", "0.1"],
            "cannot keep the memory limit of 0.1",
        ),
        (["show", "v-half", "-p", "4", "-m", "300000"], "can be at most 32768; a schedule repeats"),
        (["show", "v-half", "-p", "30000", "-m", "1"], "30000 ranks was asked for: give at most"),
        (["show", "wave", *SIZES, "--chunks", "900000"], "on 3600000 stages are too many"),
        (["show", "v-half\n\x1b[31m", *SIZES], r"schedule 'v-half\n\x1b[31m'"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("megatron-zb: error: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "said"),
    [
        *((wrong, f"'{wrong}' is not a whole number of 1 or more") for wrong in ("0", "-2", "1.5")),
        ("many", "'many' is not a whole number"),
        ("1000001", "1000001 is more than 1000000"),
    ],
)
def test_sizes_are_whole_numbers(size: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "v-half", f"--pipeline-size={size}", "--num-microbatches", "8"]
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_picture_without_matplotlib_tells_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["show", "v-half", *SIZES, "--output", str(tmp_path / "x.png")]) == 2
    assert "pip install 'megatron-zb[plots]'" in capsys.readouterr().err


def test_the_terminal_needs_neither_torch_nor_megatron_nor_matplotlib() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_zb.cli.main import main\n"
        f"sys.exit(main({['show', 'v-half', *SIZES]!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("v-half: 4 ranks, 8 microbatches")


def test_the_installed_command_tells_its_version() -> None:
    command = Path(sys.executable).with_name("megatron-zb")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"megatron-zb {__version__}\n"
