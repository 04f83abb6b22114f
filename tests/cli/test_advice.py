"""What an error advises is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.cli import show
from megatron_zb.distill import cli as distillation
from megatron_zb.schedules.costs import MOST_RANKS

# A command line that is refused, what of the answer is advice, and what then replaces which words:
# flags of the command line get the values that the advice gives them, other flags are added.
REFUSED = [
    ("show 1f1b -p 100000 -m 8", r"--pipeline-size \d+ --num-microbatches \d+"),
    pytest.param(
        "show 1f1b -p 150 -m 4000 -o x.png",
        r"--pipeline-size \d+ --num-microbatches \d+",
        marks=pytest.mark.slow,
    ),
    ("show 1f1b -p 16 -m 4000", r"--num-microbatches \d+"),
    ("show zb-h1 -p 4 -m 9000 --slices 8 -o x.png", r"--num-microbatches \d+"),
    ("show pipe-bd -p 100000 -m 8 --blocks 4", r"--pipeline-size \d+ --num-microbatches \d+"),
    ("show pipefusion -p 4 --patches 8 --time-steps 9000", r"--patches \d+ --time-steps \d+"),
    (
        "show pipefusion -p 900 --patches 8 --time-steps 9",
        r"--pipeline-size \d+ --patches \d+ --time-steps \d+",
    ),
    ("show pipe-bd -p 65 -m 8", r"--blocks \d+"),
    ("show pipe-bd -p 4 -m 8 --blocks 65", r"--blocks \d+"),
    ("show pipe-bd -p 4 -m 8 --teacher 0 --student 0", r"--teacher \d+"),
    ("show 1f1b -p 4 -m 8 --memory-limit 0.1", r"[\d.]+ of 1F1B$"),
    ("show v-half -p 4 -m 8 --memory-limit 0.1", r"[\d.]+ of 1F1B$"),
    ("show wave -p 4 -m 8 --chunks 3", r"such as \d+"),
    ("show v-half -p 2 -m 2 --recompute 2", r"such as [\d.]+"),
    ("show zb-h1 -p 4 -m 8 --slices x", r"such as [\d,]+"),
    ("plan --config gpt_1_5b --gpus 8 --tensor 16", r"--tensor can be \d+"),
    ("plan --config gpt_1_5b --gpus 8 --seq-length 0", r"example, --seq-length \d+"),
    ("plan --config gpt_1_5b --gpus 8 --global-batch-size 0", r"example, --global-batch-size \d+"),
    ("plan --config gpt_1_5b --gpus 8 --micro-batch-size 2x", r"--micro-batch-size [\d,]+"),
]


def advised(words: list[str], advice: str) -> list[str]:
    """Change a command line as the advice says."""
    flags: dict[str, str] = dict(re.findall(r"(--[\w-]+)(?: can be)? ([\d.,]+)", advice))
    if not flags:  # a value for the last flag
        flags = {words[-2]: re.findall(r"[\d.,]*\d", advice)[0]}
    short = {"--pipeline-size": "-p", "--num-microbatches": "-m"}
    for name, value in flags.items():
        flag = short.get(name, name)
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


@pytest.mark.usefixtures("brief_searches")
@pytest.mark.parametrize(("words", "advice"), REFUSED)
def test_advice_is_accepted(
    words: str,
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distillation, "_MOST_BLOCKS", 64)  # more take the solver seconds
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    found = re.search(advice, said)
    assert found, said
    again = advised(words.split(), found.group())
    if again[0] == "plan":
        again += ["--tries", "1", "--schedules", "v-zb"]
    assert cli.main(again) == 0, capsys.readouterr().err


@pytest.mark.parametrize("most", [show.MOST_IN_TERMINAL, show.MOST_IN_PICTURE])
@pytest.mark.parametrize("slices", [1, 8, 64])
def test_advised_sizes_can_be_drawn_and_fill_every_schedule(most: int, slices: int) -> None:
    for ranks in (2, 5, 31, 64, 1000, 1_000_000):
        flags = dict(re.findall(r"(--[\w-]+) (\d+)", show._enough(ranks, slices, most)))
        p = int(flags.get("--pipeline-size", ranks))
        m = int(flags["--num-microbatches"])
        assert p * m * slices <= most
        assert m >= 2 * p


def test_sizes_that_just_fit_are_advised() -> None:
    assert show._enough(64, 2, 4 * 64 * 64 * 2) == "--num-microbatches 256"
    assert "--pipeline-size 32" in show._enough(64, 2, 4 * 64 * 64 * 2 - 1)


def test_a_table_that_is_too_large_to_draw_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = schedules.build("1f1b", pipeline_size=2, num_microbatches=20)
    path = tmp_path / "table.csv"
    schedules.interchange.write_csv(table, path)
    monkeypatch.setattr(show, "MOST_IN_TERMINAL", 30)
    assert cli.main(["show", "--csv", str(path)]) == 2
    said = capsys.readouterr().err
    assert "--num-microbatches" not in said
    found = re.search(r"megatron-zb (export --csv FILE .* FILE\.json)", said)
    assert found
    again = found.group(1).replace("FILE.json", str(tmp_path / "x.json"))
    assert cli.main(again.replace("FILE", str(path)).split()) == 0


@pytest.mark.slow
def test_the_largest_pipeline_that_is_named_is_accepted(tmp_path: Path) -> None:
    words = ["export", "zb-h1", "-p", str(MOST_RANKS), "-m", "2", "--format", "csv", "-o"]
    assert cli.main([*words, str(tmp_path / "x.csv")]) == 0
