"""Jobs of the real pretrain_gpt.py on forked ranks, as torchrun starts them but in seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Ended, try_job
from rank_process import Kind

from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, pretrain

SHORT = f"{MODEL} {PIPELINE_OF_TWO} --num-workers 0"


def forked(checkout: Path, flags: str, timeout: float = 120) -> Ended:
    words = [str(checkout / "pretrain_gpt.py"), "--cpu", *SHORT.split(), *flags.split()]
    return try_job(2, "megatron_zb.launch", words, timeout, Kind.MEGATRON_LM)


def numbers(name: str, printed: str) -> list[str]:
    """Numbers of the log by their name, with all their digits."""
    return re.findall(rf"\b{name}: (\d\.\d{{9}}E[+-]\d\d)", printed)


def test_forked_ranks_log_what_torchruns_ranks_log_with_more_digits(
    checkout: Path, tmp_path: Path
) -> None:
    torchrun = pretrain(checkout, SHORT, "--exit-interval 5", ranks=2, torchrun=True)
    run = forked(checkout, f"--exit-interval 5 --save {tmp_path} --save-interval 2")
    assert (run.code, run.hung, run.left) == (0, False, ()), run.stderr
    losses, norms = numbers("lm loss", run.stdout), numbers("grad norm", run.stdout)
    assert [f"{float(loss):.6E}" for loss in losses] == list(torchrun.losses.values())
    assert [f"{float(norm):.3f}" for norm in norms] == list(torchrun.norms.values())

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = forked(checkout, f"--exit-interval 5 --load {tmp_path} --pipeline-schedule v-half")
    # The second loss after a start is averaged with the first.
    assert numbers("lm loss", resumed.stdout)[2:] == losses[4:], resumed.stderr
    # A rank of a V sums the squares of other layers: the last bits of fp32 differ.
    again = list(map(float, numbers("grad norm", resumed.stdout)))
    assert again == pytest.approx(list(map(float, norms[2:])), rel=3e-7)


def test_a_refusal_and_a_hang_differ(checkout: Path) -> None:
    refused = forked(checkout, "--pipeline-schedule none-such")
    assert refused.code and not refused.hung
    assert "megatron_zb: error: " in refused.stderr
    assert forked(checkout, "--train-iters 100000", timeout=6).hung
