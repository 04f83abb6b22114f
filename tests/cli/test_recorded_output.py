"""What commands print, word for word: those that draw and export schedules, and models' flags."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from recorded import OF_PYTHON, assert_as_recorded

from megatron_zb.cli import main as cli

RECORDED = Path(__file__).parent / "recorded"
pytestmark = OF_PYTHON
TINY = "--pipeline-size 2 --num-microbatches 4"
SMALL = "--pipeline-size 3 --num-microbatches 5"
SIZES = "--pipeline-size 4 --num-microbatches 8"
TIMES = "--forward 1 --backward 1.2 --weight 0.7 --p2p 0.05"
BLOCKS = "--teacher 1 1 2 1 1 1 --student 3 3 5 3 3 2 --update 1"
OUTPUT = {
    "show_families": [
        f"show {name} {SIZES}"
        for name in (
            "gpipe 1f1b interleaved 1f1b-v zb-h1 zb-h2 zb-1p zb-2p v-zb v-half v-min wave "
            "dualpipe-v auto"
        ).split()
    ],
    "show_costs": [f"show {name} {SMALL} {TIMES}" for name in ("1f1b", "zb-h1", "v-zb", "v-half")],
    "show_choices": [
        f"show interleaved {SIZES} --chunks 3",
        f"show interleaved {SIZES} --group-size 6",
        f"show wave {SIZES} --chunks 4 {TIMES}",
        f"show auto {SIZES} --memory-limit 0.5",
        f"show auto {SIZES} --memory-limit 0.7 {TIMES}",
        f"show v-half {SIZES} --memory-limit 0.4",
        f"show dualpipe-v {SIZES} --forward-comm 0.5 --backward-comm 0.4",
        f"show v-zb {TINY} --recompute 0.1 --memory-limit 0.45",
        f"show v-half {SIZES} --cut-output 2",
        f"show zb-h1 {SMALL} --cut-output 1.5 {TIMES}",
        f"show v-zb {SMALL} --slices 4 --attention 0.5",
        f"show zb-h1 {SMALL} --slices 2,1,1 --attention 0.3 {TIMES}",
    ],
    "show_blocks": [
        f"show pipe-bd {SIZES}",
        f"show pipe-bd {SIZES} --steps 3 {BLOCKS}",
        f"show pipe-bd {SIZES} --steps 2 {BLOCKS} --distribution even --relay 0.2",
        f"show pipe-bd {SIZES} {BLOCKS} --distribution 0-1:1,2-2:2,3-5:1 --reduce 2",
        f"show pipe-bd {SIZES} --run-ahead 0 --steps 2 --blocks 8 --teacher 1",
    ],
    "show_patches": [
        "show pipefusion --pipeline-size 4 --patches 8 --time-steps 2",
        "show pipefusion --pipeline-size 4 --patches 2 --time-steps 3 --forward 2 --p2p 0.5",
    ],
    "export": [
        f"export v-half {SIZES} --format csv --output -",
        f"export zb-h1 {SMALL} --format chrome-trace --output -",
        f"export v-zb {SMALL} --slices 2 --format csv --output -",
        f"export dualpipe-v {SMALL} --forward-comm 0.5 --format csv --output -",
        f"export v-zb {TINY} --offload 0.4 --memory-limit 0.5 --format chrome-trace --output -",
        f"export v-zb {TINY} --recompute 0.1 --memory-limit 0.45 --format chrome-trace -o -",
        f"export pipe-bd {SMALL} --blocks 6 --format chrome-trace --output -",
        "export pipefusion -p 2 --patches 2 --time-steps 2 --format chrome-trace --output -",
    ],
    "refused": [
        "show",
        "show v-halff --pipeline-size 4 --num-microbatches 8",
        "show v-half --pipeline-size 0 --num-microbatches 8",
        "show v-half --pipeline-size 4 --num-microbatches 0",
        "show v-half --pipeline-size 100000 --num-microbatches 8",
        "show v-half --pipeline-size 4 --num-microbatches 100000000",
        f"show v-half {SIZES} --chunks 3",
        f"show 1f1b {SIZES} --group-size 3",
        f"show interleaved {SIZES} --group-size 3",
        f"show interleaved {SIZES} --chunks 1",
        f"show v-half {SIZES} --memory-limit 0",
        f"show v-half {SIZES} --memory-limit 0.1",
        f"show v-half {SIZES} --forward 0",
        f"show v-half {SIZES} --weight -1",
        f"show v-half {SIZES} --p2p inf",
        f"show v-half {SIZES} --attention 0.5",
        f"show v-half {SIZES} --slices 0",
        f"show v-half {SIZES} --slices 2 --attention 1",
        f"show v-half {SIZES} --slices 2 --offload 1",
        f"show v-half {SIZES} --cut-output 0",
        f"show v-half {SIZES} --teacher 1",
        f"show pipe-bd {SIZES} --memory-limit 1",
        f"show pipe-bd {SIZES} --teacher 1 2 --student 1 2 3",
        f"show pipe-bd {SIZES} --distribution 0-1:1",
        f"show pipe-bd {SIZES} --steps 0",
        f"show pipe-bd {SIZES} --run-ahead -1",
        "show pipefusion --pipeline-size 4",
        f"show pipefusion {SIZES}",
        "show --csv nowhere.csv",
        f"show v-half {SIZES} --output v-half.txt",
        f"export v-half {SIZES} --format csv",
        "flags --config nowhere",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("name", OUTPUT)
def test_a_command_prints_what_it_printed(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    found = []
    for command in OUTPUT[name]:
        code = cli.main(command.split())
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if line.startswith("megatron-zb:")]
        found += [f"$ megatron-zb {command}", printed.out.rstrip(), *errors]
        found += [f"exit status {code}", ""]
    assert_as_recorded("\n".join(found), RECORDED / f"{name}.txt")


@pytest.mark.parametrize("words", ["", "--schedule", "--mock-data"])
def test_a_models_flags_are_what_they_were(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[2] / "configs" / "models"
    found = []
    for file in sorted(folder.glob("*.yaml")):
        code = cli.main(["flags", "--config", file.stem, *words.split()])
        printed = capsys.readouterr()
        found += [f"{file.stem}: exit status {code}", *printed.out.split("\n"), printed.err]
    name = f"flags{words.replace('--', '_').replace('-', '_')}"
    assert_as_recorded("\n".join(found), RECORDED / f"{name}.txt")


def test_pages_are_what_they_were(tmp_path: Path) -> None:
    """A page holds its numbers as JSON; the scripts and styles around them have their own tests."""
    lines = []
    commands = [
        f"v-half {SIZES}",
        f"dualpipe-v {SIZES} --forward-comm 0.5 --backward-comm 0.4",
        f"v-zb {TINY} --recompute 0.1 --memory-limit 0.45",
        f"v-half {SIZES} --cut-output 2",
        f"interleaved {SMALL} {TIMES}",
    ]
    for command in commands:
        page = tmp_path / "page.html"
        assert cli.main(["show", *command.split(), "--output", str(page)]) == 0
        text = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text("utf-8"), flags=re.S)
        data = re.findall(r"<script[^>]*json[^>]*>(.*?)</script>", page.read_text("utf-8"), re.S)
        digests = [hashlib.sha256(each.encode()).hexdigest()[:12] for each in (text, *data)]
        lines.append(f"{command}: {len(text)} characters, {' '.join(digests)}")
    assert_as_recorded("\n".join(lines), RECORDED / "pages.txt")
