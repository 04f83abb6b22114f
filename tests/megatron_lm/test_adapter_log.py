"""The progress of adapters, as lines and as curves."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_zb.lora.adapter_file import AdapterEntry, AdapterJob
from megatron_zb.lora.training import Stepped
from megatron_zb.megatron_lm.adapter_log import AdapterProgress, write_curves

JOB = AdapterJob(
    AdapterEntry.model_validate({"name": "french"}),
    {"train_iters": 500, "global_batch_size": 32},
    microbatches=4,
)


def progress(norm: float | None, *, is_done: bool = True) -> AdapterProgress:
    return AdapterProgress(JOB, 10, Stepped(is_done, norm, 1e-4), {"lm loss": 5.25}, 1024.0, 0.5)


@pytest.mark.parametrize(
    ("step", "end"),
    [
        (progress(0.25), " loss scale: 1024.0 | grad norm: 0.250 |"),
        (progress(None, is_done=False), " loss scale: 1024.0 | skipped |"),
    ],
    ids=["done", "skipped"],
)
def test_a_line_has_the_words_of_megatron(step: AdapterProgress, end: str) -> None:
    assert step.line == (
        " adapter french | iteration       10/     500 | consumed samples:          320 | elapsed "
        "time per iteration (ms): 500.0 | learning rate: 1.000000E-04 | global batch size:    32 | "
        f"lm loss: 5.250000E+00 |{end}"
    )


class Writer:
    """Stands in for the writers of TensorBoard and of wandb, of which only these are called."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[dict[str, float]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def log(self, values: dict[str, float], **more: Any) -> None:
        assert not more, "its steps may not go back"
        self.logged.append(values)


def test_curves_have_the_name_of_their_adapter() -> None:
    board, wandb = Writer(), Writer()
    write_curves(progress(0.25), board, wandb)
    assert board.scalars == [
        ("french/lm loss", 5.25, 10),
        ("french/learning-rate", 1e-4, 10),
        ("french/loss-scale", 1024.0, 10),
        ("french/grad-norm", 0.25, 10),
    ]
    values = {tag: value for tag, value, _ in board.scalars}
    assert wandb.logged == [{**values, "french/iteration": 10}]
    write_curves(progress(None), board, None)
    assert "french/grad-norm" not in {tag for tag, *_ in board.scalars[4:]}
    assert len(wandb.logged) == 1
