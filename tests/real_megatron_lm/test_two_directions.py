"""Chimera and BitPipe train as Megatron does, but for the order in which gradients are added up."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, Logged, pretrain

UNTIED = f"{MODEL} --untie-embeddings-and-output-weights"
SIZES = {2: PIPELINE_OF_TWO, 4: PIPELINE}


@pytest.fixture(scope="module")
def untied(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of Megatron's own 1F1B."""
    folder = tmp_path_factory.mktemp("untied")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, UNTIED, PIPELINE, saving)
    assert run.code == 0, run.output
    return folder


def check_near(run: Logged, other: Logged) -> None:
    assert run.code == 0, run.output
    assert run.losses.keys() == other.losses.keys() != set()
    for step, loss in other.losses.items():
        assert float(run.losses[step]) == pytest.approx(float(loss), rel=2e-6)
        assert float(run.norms[step]) == pytest.approx(float(other.norms[step]), abs=1.01e-3)
    assert run.evaluations.keys() == other.evaluations.keys() != set()


@pytest.mark.parametrize(
    ("name", "p", "more"),
    [
        ("chimera", 4, ""),
        ("bitpipe", 4, ""),
        ("chimera", 2, "--use-distributed-optimizer --attention-dropout .1"),
        ("bitpipe", 2, "--bf16"),
    ],
    ids=["chimera", "bitpipe", "replicas", "bf16"],
)
def test_both_directions_train_one_model(
    checkout: Path, untied: Path, tmp_path: Path, name: str, p: int, more: str
) -> None:
    """It goes on from a checkpoint of 1F1B, and 1F1B and itself go on from one of its own."""
    ranks = 4 if "distributed" in more else p
    model, chosen = f"{UNTIED} {SIZES[p]} {more}", f"--pipeline-schedule {name}"
    save = f"--save {tmp_path} --save-interval 4"
    start = f"--load {untied} --no-load-rng" if not more else f"--load {untied} --finetune"
    plain = "--pipeline-schedule 1f1b" if "dropout" in more else ""
    whole = pretrain(checkout, model, chosen, start, ranks=ranks)
    check_near(whole, pretrain(checkout, model, plain, start, ranks=ranks))
    first = pretrain(checkout, model, chosen, start, save, "--exit-interval 4", ranks=ranks)
    assert first.code == 0, first.output
    load = f"--load {tmp_path}"
    again = pretrain(checkout, model, chosen, load, ranks=ranks)
    assert again.code == 0, again.output
    assert again.losses == {step: whole.losses[step] for step in again.losses}
    assert max(again.losses) == 7
    assert again.evaluations == whole.evaluations
    check_near(again, pretrain(checkout, model, plain, load, ranks=ranks))
