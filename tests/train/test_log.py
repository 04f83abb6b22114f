"""Lines of the trainer's log, in Megatron-LM's words."""

from __future__ import annotations

import pytest

from megatron_zb.train.log import line_of

RECORD = {
    "iteration": 7,
    "consumed_samples": 56,
    "seconds": 0.25,
    "learning_rate": 1e-3,
    "global_batch_size": 8,
    "lm_loss": 5.25,
    "loss_scale": 1.0,
    "grad_norm": 2.5,
    "skipped": False,
}


@pytest.mark.parametrize(
    ("last", "beginning"),
    [(100, "iteration        7/     100 |"), (10**9, "iteration          7/1000000000 |")],
)
def test_a_line_has_megatrons_columns(last: int, beginning: str) -> None:
    line = line_of(RECORD, last)
    assert line.startswith(f"{beginning} consumed samples:           56 | ")
    assert line.endswith(
        "elapsed time per iteration (ms): 250.0 | learning rate: 1.000000E-03 | "
        "global batch size:     8 | lm loss: 5.250000E+00 | loss scale: 1.0 | grad norm: 2.500 | "
        "number of skipped iterations:   0 |"
    )
