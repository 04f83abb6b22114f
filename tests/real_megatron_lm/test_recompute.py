"""Recomputation and offload in the real pretrain_gpt.py: every digit is upstream's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_zb.measured.profile import read_profile
from real_megatron_lm.runs import MODEL, PIPELINE_OF_TWO, Logged, check_equal, pretrain


@pytest.fixture(scope="module")
def start(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    """Two iterations of upstream, and what it logs in the next five."""
    folder = tmp_path_factory.mktemp("start")
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, saving, ranks=2)
    assert run.code == 0, run.output
    upstream = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {folder}", ranks=2)
    assert list(upstream.losses) == [3, 4, 5, 6, 7], upstream.output
    return folder, upstream


@pytest.mark.parametrize("name", ["v-half", "auto"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pipeline-recompute auto --pipeline-memory-limit 0.45", "forwards keep their input"),
        ("--pipeline-offload auto --pipeline-memory-limit 0.5", "activations move to the host"),
    ],
)
def test_what_is_recomputed_or_offloaded_logs_what_upstream_logs(
    checkout: Path, start: tuple[Path, Logged], name: str, flags: str, said: str
) -> None:
    folder, upstream = start
    chosen = f"--pipeline-schedule {name} {flags}"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, f"--load {folder}", chosen, ranks=2)
    check_equal(run, upstream)
    assert re.search(rf"  [1-9]\d* of \d+ {said}", run.output)


@pytest.mark.parametrize("flag", ["--pipeline-recompute", "--pipeline-offload"])
def test_a_run_with_recomputation_measures_itself_and_logs_what_upstream_logs(
    checkout: Path, start: tuple[Path, Logged], tmp_path: Path, flag: str
) -> None:
    """Nine iterations that measure, and some with the order for what was measured."""
    folder, _ = start
    more = f"--load {folder} --train-iters 14 --override-opt_param-scheduler"
    upstream = pretrain(checkout, MODEL, PIPELINE_OF_TWO, more, ranks=2)
    assert list(upstream.losses) == list(range(3, 15)), upstream.output
    path = tmp_path / "run.yaml"
    chosen = f"--pipeline-schedule auto --pipeline-memory-limit 0.45 {flag} auto"
    profiled = f"--pipeline-profile {path}"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, more, chosen, profiled, ranks=2)
    check_equal(run, upstream)
    assert "megatron_zb: measured: going on with auto" in run.output
    profile = read_profile(path)
    assert profile.host_link is not None
    has_r = any(stage.recompute is not None for stage in profile.stages)
    assert has_r is (flag == "--pipeline-recompute")


def test_what_recomputes_layers_already_is_refused(checkout: Path) -> None:
    flags = "--pipeline-schedule v-half --pipeline-recompute auto --recompute-granularity full"
    more = "--recompute-method uniform --recompute-num-layers 1"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, flags, more, ranks=2)
    assert run.code != 0
    assert "--recompute-granularity full cannot be combined with --pipeline-recompute" in run.error
