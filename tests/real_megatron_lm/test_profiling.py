"""The real pretrain_gpt.py measures itself, and goes on to the losses of upstream."""

from __future__ import annotations

from pathlib import Path

from megatron_zb.measured.profile import read_profile, write_profile
from megatron_zb.measured.trace import compare
from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, check_equal, pretrain

_LONGER = MODEL.replace("--train-iters 7", "--train-iters 14")


def test_auto_measures_and_a_profile_balances(
    checkout: Path, upstream_checkpoint: Path, tmp_path: Path
) -> None:
    """Auto profiles nine iterations, and another run takes its layers from the file."""
    file = tmp_path / "run.yaml"
    load = f"--load {upstream_checkpoint} --override-opt-param-scheduler"
    flags = (_LONGER, PIPELINE, load)
    upstream = pretrain(checkout, *flags)
    auto = pretrain(checkout, *flags, f"--pipeline-schedule auto --pipeline-profile {file}")
    check_equal(auto, upstream)
    assert len(auto.losses) > 9
    assert sum("measured: going on with auto" in line for line in auto.said) == 1, auto.said
    profile = read_profile(file)
    assert (profile.pipeline_size, profile.num_microbatches) == (4, 8)
    assert (profile.model.layers, profile.model.hidden_size) == (8, 64)
    assert len(compare(file).differences()) == 4

    last = profile.stages[-1]
    heavy = last.model_copy(
        update={name: 9 * getattr(last, name) for name in ("forward", "weight")}
    )
    assert profile.parts is not None
    changed = {"stages": [*profile.stages[:-1], heavy], "parts": None}  # solved from the stages
    write_profile(profile.model_copy(update=changed), file)
    balanced = pretrain(
        checkout, *flags, f"--pipeline-schedule v-half --pipeline-layer-layout {file}"
    )
    check_equal(balanced, upstream)
    assert "stage 7 (output layer)" in balanced.output
    assert "layers are balanced for " in balanced.output


def test_a_run_that_is_too_short_for_its_profile_says_so(checkout: Path, tmp_path: Path) -> None:
    """At its first iteration if it knows its end, else at the end: one is skipped here."""
    file = tmp_path / "run.yaml"
    profiled = f"{PIPELINE_OF_TWO} --pipeline-schedule zb-h1 --pipeline-profile {file}"
    short, skipping = (
        pretrain(checkout, MODEL, profiled, more, ranks=2)
        for more in ("--exit-interval 2", "--train-iters 9 --iterations-to-skip 3")
    )
    assert short.said[-1:] == [
        f"megatron_zb: --pipeline-profile {file} needs 9 iterations, and this run has 2: nothing "
        "is measured; train for 7 more, or leave it out"
    ]
    assert skipping.said[-1:] == [
        f"megatron_zb: --pipeline-profile {file} has measured nothing: it needs 9 iterations of 8 "
        "microbatches, 1 more than this run had"
    ]
    assert not file.exists()
