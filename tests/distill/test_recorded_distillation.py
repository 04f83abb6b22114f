"""Plans of distillations, and where drawn blocks go: number by number what they were."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from recorded import assert_as_recorded, lines_of

from megatron_zb.cli import main as cli

RECORDED = Path(__file__).parent / "recorded"
JOB = "--gpus 8 --device h100_sxm --global-batch-size 64"
PLANS = {
    "half_mlp": f"--config llama3_8b {JOB} --student-config half_mlp --tokens 1B",
    "kv_heads": f"--config qwen3_8b {JOB} --student-config fewer_kv_heads --seq-length 4096",
    "library": f"--config llama3_8b {JOB} --student-config library --tokens 2.5B --seq-length 4096",
    "few_gpus": "--config llama2_7b --gpus 2 --device a100_80gb_sxm --student-config half_mlp",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_a_distillation_says_what_it_said(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    text = ""
    for form in ("table", "json"):
        code = cli.main(["plan", *PLANS[name].split(), "--format", form])
        printed = capsys.readouterr()
        out = printed.out.rstrip()
        if form == "json" and code == 0:
            out = lines_of(json.loads(out))
        errors = [line for line in printed.err.splitlines() if "error" in line]
        text += "\n".join([f"{form}, exit status {code}", out, *errors, ""])
    assert_as_recorded(text, RECORDED / f"{name}.txt")


def test_drawn_blocks_are_shown_where_they_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    chance = random.Random(5)

    def times(count: int) -> str:
        return " ".join(f"{chance.uniform(0.5, 2):.3f}" for _ in range(count))

    text = ""
    for blocks, ranks in ((5, 2), (6, 3), (8, 4), (4, 6), (9, 5)):
        words = f"pipe-bd -p {ranks} -m {chance.randint(2, 6)} --steps {chance.randint(1, 3)}"
        words += f" --teacher {times(blocks)} --student {times(blocks)} --update {times(blocks)}"
        words += f" --relay {chance.uniform(0, 0.3):.3f} --reduce {chance.uniform(0, 5):.3f}"
        words += f" --run-ahead {chance.randint(0, 2)}"
        code = cli.main(["show", *words.split()])
        text += f"$ show {words}\n{capsys.readouterr().out.rstrip()}\nexit status {code}\n\n"
    assert_as_recorded(text, RECORDED / "drawn_blocks.txt")
