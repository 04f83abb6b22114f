"""Experts spread over ranks, with forwards and backwards in one pass: every digit is upstream's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from joined_pairs import joined

from megatron_zb import schedules
from megatron_zb.measured.profile import read_profile, write_profile
from megatron_zb.measured.trace import compare
from megatron_zb.schedules import interchange
from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_equal, pretrain

EXPERTS = f"""
{PIPELINE_OF_TWO} --expert-model-parallel-size 2 --bf16 --num-experts 4 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear
--moe-shared-expert-intermediate-size 64 --moe-token-dispatcher-type alltoall
--untie-embeddings-and-output-weights --use-distributed-optimizer --overlap-grad-reduce
--dist-ckpt-optim-fully-reshardable
"""
OVERLAP = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"


@pytest.fixture(scope="module")
def experts(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    """Two iterations of upstream without the flag, and what it logs in the next five."""
    folder = tmp_path_factory.mktemp("experts")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, MODEL, EXPERTS, saving)
    assert run.code == 0, run.output
    upstream = pretrain(checkout, MODEL, EXPERTS, f"--load {folder}")
    assert list(upstream.losses) == [3, 4, 5, 6, 7], upstream.output
    return folder, upstream


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("v-half", ""),
        ("v-zb", ""),
        ("v-zb", "--pipeline-recompute auto --pipeline-memory-limit 0.75"),
    ],
)
def test_pairs_log_what_upstream_logs(
    checkout: Path, experts: tuple[Path, Logged], name: str, more: str
) -> None:
    folder, upstream = experts
    flags = f"--load {folder} --pipeline-schedule {name} {OVERLAP} {more}"
    run = pretrain(checkout, MODEL, EXPERTS, flags)
    check_equal(run, upstream)
    assert re.search(r"  [1-9]\d* of 16 forwards run in one pass with a backward", run.output)


def test_pairs_of_a_table_log_what_upstream_logs(
    checkout: Path, experts: tuple[Path, Logged], tmp_path: Path
) -> None:
    folder, upstream = experts
    order = joined(schedules.build("interleaved", pipeline_size=2, num_microbatches=4))
    table = tmp_path / "pairs.csv"
    table.write_text(interchange.to_csv(order))
    flags = f"--load {folder} --pipeline-schedule-file {table} {OVERLAP}"
    check_equal(pretrain(checkout, MODEL, EXPERTS, flags), upstream)


def test_pairs_are_profiled(checkout: Path, experts: tuple[Path, Logged], tmp_path: Path) -> None:
    """A run goes on with what it has measured, and another one begins with it."""
    folder, _ = experts
    file = tmp_path / "run.yaml"
    longer = MODEL.replace("--train-iters 7", "--train-iters 16")
    flags = (longer, EXPERTS, f"--load {folder} --override-opt-param-scheduler")
    upstream = pretrain(checkout, *flags)
    measuring = f"--pipeline-profile {file} --pipeline-replan-every 13"
    run = pretrain(checkout, *flags, f"--pipeline-schedule v-half {OVERLAP} {measuring}")
    check_equal(run, upstream)
    assert sum("measured: going on with v-half" in line for line in run.said) == 1, run.said
    profile = read_profile(file)
    assert {(pair.forward, pair.backward) for pair in profile.pairs} <= {
        (f, b) for f in range(4) for b in (f, 3 - f)
    }
    assert profile.all_to_all is not None
    assert len(compare(file).differences()) == 2

    both = [s.forward + s.backward for s in profile.stages]
    hiding = [p.model_copy(update={"seconds": 0.75 * both[p.forward]}) for p in profile.pairs]
    write_profile(profile.model_copy(update={"pairs": hiding}), file)
    known = pretrain(
        checkout, *flags, f"--pipeline-schedule v-half {OVERLAP} --pipeline-layer-layout {file}"
    )
    all_to_all = read_profile(file).all_to_all
    assert all_to_all is not None
    assert f"an expert all-to-all of {all_to_all.share:.0%} of a forward" in known.output
    check_equal(known, upstream)
