"""Chimera and BitPipe train as Megatron does, but for the order in which gradients are added up."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, Logged, pretrain

UNTIED = f"{MODEL} --untie-embeddings-and-output-weights"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
SIZES = {2: PIPELINE_OF_TWO, 4: PIPELINE}


@pytest.fixture(scope="module")
def untied(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of Megatron's own 1F1B."""
    folder = tmp_path_factory.mktemp("untied")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, UNTIED, PIPELINE, saving)
    assert run.code == 0, run.output
    return folder


def check_near(run: Logged, other: Logged, digits: float) -> None:
    """The first loss is the same; gradients are added up in another order."""
    assert run.code == 0, run.output
    assert run.losses.keys() == other.losses.keys() != set()
    first = min(run.losses)
    assert run.losses[first] == other.losses[first]
    for step, loss in other.losses.items():
        assert float(run.losses[step]) == pytest.approx(float(loss), rel=digits)
        assert float(run.norms[step]) == pytest.approx(float(other.norms[step]), abs=1.01e-3)
    assert run.evaluations.keys() == other.evaluations.keys() != set()


@pytest.mark.parametrize(
    ("name", "p", "more", "digits"),
    [
        ("chimera", 4, "", 2e-6),
        ("bitpipe", 4, "", 2e-6),
        (
            "chimera",
            2,
            f"{RESHARDABLE} --attention-dropout .1",
            1e-4,
        ),
        ("bitpipe", 2, "--bf16", 1e-4),
    ],
    ids=["chimera", "bitpipe", "replicas", "bf16"],
)
def test_both_directions_train_one_model(
    checkout: Path, untied: Path, tmp_path: Path, name: str, p: int, more: str, digits: float
) -> None:
    """A run resumes from a checkpoint of 1F1B; 1F1B and a second run resume from its own."""
    ranks = 4 if "distributed" in more else p
    model, chosen = f"{UNTIED} {SIZES[p]} {more}", f"--pipeline-schedule {name}"
    save = f"--save {tmp_path} --save-interval 4"
    start = f"--load {untied} --no-load-rng" if not more else f"--load {untied} --finetune"
    plain = ""
    if "dropout" in more:  # from weights that layers draw, as they draw masks
        start, plain = "", "--pipeline-schedule 1f1b --pipeline-random-streams layer"
    whole = pretrain(checkout, model, chosen, start, ranks=ranks)
    check_near(whole, pretrain(checkout, model, plain, start, ranks=ranks), digits)
    first = pretrain(checkout, model, chosen, start, save, "--exit-interval 4", ranks=ranks)
    assert first.code == 0, first.output
    load = f"--load {tmp_path}"
    again = pretrain(checkout, model, chosen, load, ranks=ranks)
    assert again.code == 0, again.output
    second = again.losses.pop(6)  # Megatron-LM logs a mean over the first two of a job
    assert float(second) == pytest.approx((float(whole.losses[5]) + float(whole.losses[6])) / 2)
    assert again.losses == {step: whole.losses[step] for step in (5, 7)}
    assert again.evaluations == whole.evaluations
    again.losses[6] = second
    check_near(again, pretrain(checkout, model, plain, load, ranks=ranks), digits)
