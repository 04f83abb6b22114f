"""Checkpoints move between placements, sizes and schedules, or are refused in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zb.megatron_lm.checkout import checkout_at
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
    ids=["upstream", "zb-2p", "interleaved", "upstream-p2", "v-min-p2", "wave-p2"],
)
def test_a_checkpoint_of_v_half_goes_on_anywhere(
    checkout: Path, v_half_checkpoint: Path, v_half: Logged, ranks: int, flags: str
) -> None:
    run = pretrain(checkout, MODEL, flags, f"--load {v_half_checkpoint}", ranks=ranks)
    check_equal(run, v_half)


def test_an_upstream_checkpoint_goes_on_at_another_size(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged
) -> None:
    flags = f"--pipeline-model-parallel-size 2 {V_HALF} --load {upstream_checkpoint}"
    check_equal(pretrain(checkout, MODEL, flags, ranks=2), upstream)


def test_where_gradients_are_clipped_the_last_digit_may_differ(
    checkout: Path, upstream_checkpoint: Path
) -> None:
    """The norm, by which they are divided, is summed over ranks that hold other layers."""
    clipping = MODEL.replace("--clip-grad 100", "--clip-grad 0.3")
    flags = f"{PIPELINE} --load {upstream_checkpoint}"
    upstream = pretrain(checkout, clipping, flags)
    assert all(float(norm) > 0.3 for norm in upstream.norms.values())
    for schedule in ("v-zb", "v-half", "auto"):
        run = pretrain(checkout, clipping, flags, f"--pipeline-schedule {schedule}")
        assert list(run.losses) == [3, 4, 5, 6, 7], run.output
        for step, loss in upstream.losses.items():
            assert float(run.losses[step]) == pytest.approx(float(loss), abs=2.01e-6)
            assert float(run.norms[step]) == pytest.approx(float(upstream.norms[step]), abs=1.01e-3)


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


REPLICAS = "--pipeline-model-parallel-size 2"  # of four ranks, so that each stage is there twice
PREDICTION = (
    "--untie-embeddings-and-output-weights --mtp-num-layers 1 --position-embedding-type rope"
)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        PREDICTION,
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
        "--ckpt-assume-constant-structure",
    ],
    ids=["tied", "prediction", "distributed", "constant-structure"],
)
def test_a_v_with_replicas_saves_and_all_go_on(checkout: Path, tmp_path: Path, flags: str) -> None:
    """One rank has a tied embedding twice; two steps, as the first is taken with loaded states."""
    save = f"--exit-interval 2 --save {tmp_path} --save-interval 1"
    saved = pretrain(checkout, MODEL, REPLICAS, flags, V_HALF, save)
    assert saved.code == 0, saved.output
    load = f"--load {tmp_path} --exit-interval 4 --ckpt-fully-parallel-load"
    upstream = pretrain(checkout, MODEL, REPLICAS, flags, load)
    assert list(upstream.losses) == [3, 4], upstream.output
    check_equal(pretrain(checkout, MODEL, REPLICAS, flags, load, V_HALF), upstream)
    check_equal(
        pretrain(checkout, MODEL, REPLICAS, flags, load, "--pipeline-schedule v-zb"), upstream
    )


def test_a_v_with_two_learning_rates_saves_and_all_go_on(checkout: Path, tmp_path: Path) -> None:
    """The first rank of a mirrored V has no weight of the group with the second rate."""
    if checkout_at(checkout).version < (0, 17):
        pytest.skip("--decoupled-lr: Megatron-LM 0.16 cannot save it under its own schedule")
    flags = "--bf16 --untie-embeddings-and-output-weights --decoupled-lr 5e-4"
    saving = f"--save {tmp_path} --save-interval 2 --exit-interval 2"
    saved = pretrain(checkout, MODEL, PIPELINE, flags, V_HALF, saving)
    assert saved.code == 0, saved.output
    load = f"--load {tmp_path} --exit-interval 4"
    upstream = pretrain(checkout, MODEL, PIPELINE, flags, load)
    assert list(upstream.losses) == [3, 4], upstream.output
    check_equal(pretrain(checkout, MODEL, PIPELINE, flags, load, V_HALF), upstream)


@pytest.mark.parametrize(
    "optimizer",
    ["--fp16 --loss-scale 512", "--bf16 --use-distributed-optimizer"],
    ids=["fp16", "distributed"],
)
def test_ranks_without_experts_load_and_save_an_optimizer_without_weights(
    checkout: Path, tmp_path: Path, optimizer: str
) -> None:
    """The rank with both ends of a V has only dense layers; upstream has experts on all ranks."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --disable-bias-linear"
    spread = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    model = f"{REPLICAS} {experts} {spread} --num-layers 4 --moe-layer-freq [0,1,1,0]"
    flags = f"{model} {optimizer} --dist-ckpt-optim-fully-reshardable"
    saving = f"--save {tmp_path} --save-interval 2 --exit-interval 2"
    saved = pretrain(checkout, MODEL, flags, saving)
    assert saved.code == 0, saved.output
    load = f"--load {tmp_path} --exit-interval 4"
    upstream = pretrain(checkout, MODEL, flags, load)
    again = f"--save {tmp_path} --save-interval 4"
    check_equal(pretrain(checkout, MODEL, flags, load, V_HALF, again), upstream)
    load = f"--load {tmp_path} --exit-interval 6"
    upstream = pretrain(checkout, MODEL, flags, load)
    assert list(upstream.losses) == [5, 6], upstream.output
    check_equal(pretrain(checkout, MODEL, flags, load, V_HALF), upstream)


def test_the_default_format_goes_on_in_32_bits(checkout: Path, tmp_path: Path) -> None:
    """Megatron's own schedule cannot load it: it writes into weights that have gradients."""
    flags = f"{REPLICAS} --use-distributed-optimizer {V_HALF}"
    run = pretrain(checkout, MODEL, flags, f"--save {tmp_path} --save-interval 2 --exit-interval 3")
    assert run.code == 0, run.output
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    loaded = pretrain(checkout, MODEL, flags, f"--load {tmp_path} --exit-interval 3")
    assert loaded.losses == {3: run.losses[3]}, loaded.output


# Sizes that leave buckets to pad: Megatron shifts what it writes behind them.
PADDED = f"""
--num-layers 5 --hidden-size 32 --ffn-hidden-size 72 --qk-layernorm --ddp-bucket-size 5000
--overlap-grad-reduce --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
--moe-router-dtype fp32 --disable-bias-linear --untie-embeddings-and-output-weights {REPLICAS}
"""
OWN = "--pipeline-model-parallel-layout Ettt|ttL"


def test_states_of_padded_buckets_are_written_right_and_wrong_ones_refused(
    checkout: Path, tmp_path: Path
) -> None:
    save = f"--exit-interval 2 --save-interval 2 --save {tmp_path}"
    wrong = pretrain(checkout, MODEL, PADDED, OWN, f"{save}/upstream")
    assert wrong.code == 0, wrong.output
    load = f"--load {tmp_path}/upstream --exit-interval 4"
    run = pretrain(checkout, MODEL, PADDED, V_HALF, load)
    code = (checkout / "megatron/core/optimizer/distrib_optimizer.py").read_text(encoding="utf-8")
    if "padding_adjustment" in code:  # a Megatron that writes them right itself
        check_equal(run, pretrain(checkout, MODEL, PADDED, OWN, load))
    else:
        assert run.code != 0
        assert "is not that of its weights" in run.error
        assert run.error.count("\n") == 0
    flags = f"--load {tmp_path}/upstream --no-load-optim --exit-interval 3"
    weights = pretrain(checkout, MODEL, PADDED, V_HALF, flags)
    assert list(weights.losses) == [3], weights.output

    right = pretrain(checkout, MODEL, PADDED, V_HALF, f"{save}/ours")
    assert right.code == 0, right.output
    load = f"--load {tmp_path}/ours --exit-interval 4"
    upstream = pretrain(checkout, MODEL, PADDED, OWN, load)
    assert list(upstream.losses) == [3, 4], upstream.output
    check_equal(pretrain(checkout, MODEL, PADDED, load, "--pipeline-schedule v-zb"), upstream)


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
