"""Plans for training adapters on a model whose weights are frozen, as LoRA does."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from typing import Any

import pytest
from small_models import load, small

from megatron_zb.cli import main as cli
from megatron_zb.plan import byte_counts
from megatron_zb.plan.work import Workload

SIZES = "--config llama3_70b --gpus 32 --device h100_sxm --tensor 4 --pipeline 8"
SCHEDULES = (
    "--schedules zb-h1,v-zb,v-half --micro-batch-size 1 --global-batch-size 16 --seq-length 4096"
)


@cache
def planned(*more: str) -> dict[str, dict[str, Any]]:
    """The rows of a plan, by their names."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert (
            cli.main(["plan", *SIZES.split(), *SCHEDULES.split(), *more, "--format", "json"]) == 0
        )
    return {row["schedule"]: row for row in json.loads(text.getvalue())["ranked"]}


def test_a_frozen_model_has_no_weight_gradients() -> None:
    whole = load(small())
    frozen = Workload(whole.model, whole.device, whole.strategy, whole.sequence, frozen=True)
    for part in ("embedding", "output"):
        assert getattr(frozen, part)().weight == 0.0
        assert getattr(frozen, part)().forward == getattr(whole, part)().forward
    assert frozen.layer(0).weight == 0.0 < whole.layer(0).weight
    assert frozen.layer(0).backward == whole.layer(0).backward
    states = byte_counts.rank_states(frozen, [0, 1], embedding=True, output=True)
    of_whole = byte_counts.rank_states(whole, [0, 1], embedding=True, output=True)
    assert (states.gradients, states.optimizer, states.parameters) == (0.0, 0.0, 0.0)
    assert states.weights == of_whole.weights
    assert byte_counts.layer_held(frozen, 0).for_weight == 0.0
    assert byte_counts.output_held(frozen).for_weight == 0.0
    held, of_whole_held = (byte_counts.layer_held(each, 0).activation for each in (frozen, whole))
    assert held == of_whole_held


def test_zb_h1_gains_nothing_with_adapters_and_v_zb_does() -> None:
    rates = {name: row["tokens_per_second_per_gpu"] for name, row in planned("--lora").items()}
    base = rates["Megatron 1F1B"]
    assert rates["zb-h1"] == pytest.approx(base, rel=0.02)
    assert rates["v-zb"] > 1.15 * base


def test_v_half_saves_activations_with_adapters_too() -> None:
    rows = planned("--lora")
    activations = {name: row["memory"]["activations"] for name, row in rows.items()}
    assert activations["v-half"] < 0.75 * activations["Megatron 1F1B"]
    assert all(row["memory"]["weight_queue"] == 0.0 for row in rows.values())
    assert all(
        row["memory"]["gradients"] == row["memory"]["optimizer"] == 0.0 for row in rows.values()
    )


@pytest.mark.slow
def test_utilization_counts_what_adapters_need() -> None:
    row, whole = planned("--lora")["Megatron 1F1B"], planned()["Megatron 1F1B"]
    of_rate = row["mfu"] / row["tokens_per_second_per_gpu"]
    assert of_rate == pytest.approx(2 / 3 * whole["mfu"] / whole["tokens_per_second_per_gpu"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{SIZES} --lora --vocabulary on", "because its weights are frozen"),
        ("--profile run.yaml --lora", "--lora cannot be combined with --profile"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert cli.main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1
