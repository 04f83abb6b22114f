"""``megatron-zb verify`` and ``--pipeline-verify`` with the real pretrain_gpt.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_zb.cli.main import main
from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_a_training_is_verified(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = ["-m", "megatron_zb.launch", "--cpu", str(checkout / "pretrain_gpt.py")]
    words = f"{MODEL} {PIPELINE_OF_TWO} --pipeline-schedule {schedule} --pipeline-verify".split()
    given = ["verify", "--directory", str(tmp_path), "--", *torchrun, "2", *script, *words]
    assert main(given) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "equal: grad norm, lm loss, loss scale of iterations 2 to 4" in said
    log = (tmp_path / "with.log").read_text()
    assert "33 of split layers, are those of an unsplit backward" in log
    assert ": not split, " not in log
