"""Checkpoints move between placements, sizes and schedules, or are refused in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, Logged, check_equal, pretrain

V_HALF = "--pipeline-schedule v-half"


@pytest.fixture(scope="module")
def v_half_checkpoint(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of v-half; a V draws other initial weights than 1F1B does."""
    folder = tmp_path_factory.mktemp("v-half")
    run = pretrain(
        checkout, MODEL, PIPELINE, V_HALF, f"--exit-interval 2 --save {folder} --save-interval 2"
    )
    assert run.code == 0, run.output
    return folder


@pytest.fixture(scope="module")
def v_half(checkout: Path, v_half_checkpoint: Path) -> Logged:
    """The next five iterations, where they began."""
    run = pretrain(checkout, MODEL, PIPELINE, V_HALF, f"--load {v_half_checkpoint}")
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, PIPELINE),
        (4, f"{PIPELINE} --pipeline-schedule zb-2p"),
        (4, f"{PIPELINE} --pipeline-schedule interleaved"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule v-min"),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule wave"),
    ],
    ids=["stock", "zb-2p", "interleaved", "stock-p2", "v-min-p2", "wave-p2"],
)
def test_a_checkpoint_of_v_half_goes_on_anywhere(
    checkout: Path, v_half_checkpoint: Path, v_half: Logged, ranks: int, flags: str
) -> None:
    run = pretrain(checkout, MODEL, flags, f"--load {v_half_checkpoint}", ranks=ranks)
    check_equal(run, v_half)


def test_a_stock_checkpoint_goes_on_at_another_size(
    checkout: Path, stock_checkpoint: Path, stock: Logged
) -> None:
    flags = f"--pipeline-model-parallel-size 2 {V_HALF} --load {stock_checkpoint}"
    check_equal(pretrain(checkout, MODEL, flags, ranks=2), stock)


DISTRIBUTED = (
    "--pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)


@pytest.mark.parametrize("format_", ["", "--dist-ckpt-optim-fully-reshardable"])
def test_the_distributed_optimizer(checkout: Path, tmp_path: Path, format_: str) -> None:
    """Its default format is bound to the placement; the reshardable one is not."""
    save = f"--exit-interval 2 --save {tmp_path} --save-interval 2"
    saved = pretrain(checkout, MODEL, DISTRIBUTED, format_, save)
    assert saved.code == 0, saved.output
    load = f"--load {tmp_path}"
    run = pretrain(checkout, MODEL, DISTRIBUTED, format_, load, V_HALF)
    if format_:
        check_equal(run, pretrain(checkout, MODEL, DISTRIBUTED, format_, load))
        return
    assert run.code != 0
    assert "--dist-ckpt-optim-fully-reshardable" in run.error
    assert "v, 2 ranks x 2 chunks" in run.error
    same_placement = pretrain(checkout, MODEL, DISTRIBUTED, load, "--pipeline-schedule zb-h1")
    check_equal(same_placement, pretrain(checkout, MODEL, DISTRIBUTED, load))


def test_the_legacy_format_is_refused_in_a_v(checkout: Path, tmp_path: Path) -> None:
    legacy = MODEL.replace("torch_dist", "torch")
    run = pretrain(checkout, legacy, PIPELINE, V_HALF, f"--save {tmp_path}")
    assert run.code != 0
    assert "--ckpt-format torch cannot be combined with --pipeline-schedule v-half" in run.error


def test_a_checkpoint_of_other_data_is_refused_or_allowed(
    checkout: Path, v_half_checkpoint: Path
) -> None:
    """Another split is another training set, though nothing else differs.

    Not so of the data that Megatron-LM 0.16 makes up: its first samples are those of any split.
    """
    flags = f"{PIPELINE} {V_HALF} --load {v_half_checkpoint} --split 80,10,10"
    run = pretrain(checkout, MODEL, flags)
    assert run.code != 0
    assert "was trained with --split 90,5,5, but this run has --split 80,10,10" in run.error
    assert run.error.count("\n") == 0
    allowed = pretrain(checkout, MODEL, flags, "--pipeline-allow-other-data")
    assert list(allowed.losses) == [3, 4, 5, 6, 7]
