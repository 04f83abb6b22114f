"""The real pretrain_gpt.py from a fresh start, with Megatron's default dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, Logged, check_equal, pretrain

ITERATIONS = 4
DROPOUT = f"--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters {ITERATIONS}"
BY_LAYER = "--pipeline-random-streams layer"


def run(checkout: Path, ranks: int, *flags: str) -> Logged:
    size = f"--pipeline-model-parallel-size {ranks}"
    logged = pretrain(checkout, MODEL, DROPOUT, size, *flags, ranks=ranks)
    assert logged.code == 0, logged.output
    assert list(logged.losses)[-1] == ITERATIONS
    return logged


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def v_half(checkout: Path, checkpoints: Path) -> Logged:
    """A fresh start in a V, saved half way and at its end."""
    half = f"--save {checkpoints} --save-interval {ITERATIONS // 2}"
    return run(checkout, 4, "--pipeline-schedule v-half", half)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--pipeline-schedule v-zb"),
        (2, f"--pipeline-schedule zb-h1 {BY_LAYER}"),
        (
            2,
            "--pipeline-schedule v-min --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 2",
        ),
    ],
    ids=["v-zb", "zb-h1 on 2 ranks", "recomputed on 2 ranks"],
)
def test_schedules_and_sizes_agree(checkout: Path, v_half: Logged, ranks: int, flags: str) -> None:
    assert "each layer draws from separate RNG states" in v_half.output
    check_equal(run(checkout, ranks, flags), v_half)


def test_a_resumed_run_agrees(checkout: Path, v_half: Logged, checkpoints: Path) -> None:
    """The second loss that Megatron logs after a resume is a mean of two; a norm is of one."""
    half = ITERATIONS // 2
    load = f"--load {checkpoints} --ckpt-step {half} --pipeline-schedule v-zb"
    resumed = run(checkout, 4, load)
    assert list(resumed.norms) == list(range(half + 1, ITERATIONS + 1))
    assert resumed.losses[half + 1] == v_half.losses[half + 1]
    assert all(norm == v_half.norms[step] for step, norm in resumed.norms.items())
    assert resumed.evaluations == v_half.evaluations


def test_where_layers_stay_the_draws_are_upstreams(
    checkout: Path, v_half: Logged, tmp_path: Path
) -> None:
    """Also from the random states in a checkpoint, whatever upstream Megatron makes of them."""
    half = ITERATIONS // 2
    upstream = run(checkout, 4, f"--save {tmp_path} --save-interval {half}")
    check_equal(run(checkout, 4, "--pipeline-schedule zb-h1"), upstream)
    load = f"--load {tmp_path} --ckpt-step {half}"
    resumed = run(checkout, 4, load)
    assert list(resumed.norms) == list(range(half + 1, ITERATIONS + 1))
    check_equal(run(checkout, 4, load, "--pipeline-schedule zb-h1"), resumed)
    by_rank = run(checkout, 4, "--pipeline-schedule v-half --pipeline-random-streams rank")
    assert len({r.losses[1] for r in (upstream, by_rank, v_half)}) == 3
