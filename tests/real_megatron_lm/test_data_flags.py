"""Flags that change which stages read data, or how often: the losses are upstream's."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.flag_runs import check_same, check_schedules, make_texts, train

EIGHT_LAYERS = "--num-layers 8"


def test_no_stage_attends_across_documents(checkout: Path, tmp_path: Path) -> None:
    """Upstream has no mask on inner stages, so its losses on 2 ranks are the right ones."""
    flags = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
    schedules = ("v-half", "v-half --pipeline-vocabulary on", "zb-h1 on 4", "interleaved on 4")
    upstream = check_schedules(checkout, tmp_path / "start", flags, schedules, EIGHT_LAYERS)
    sliced = f"--pipeline-schedule zb-h1 --pipeline-slices 4 --load {tmp_path / 'start'}"
    on_slices = train(checkout, f"{EIGHT_LAYERS} {flags} {sliced}", ranks=4, pipeline=4)
    assert on_slices.losses == pytest.approx(upstream.losses, rel=1e-6), on_slices.error
    plain = train(checkout, f"{EIGHT_LAYERS} --load {tmp_path / 'start'}")
    assert upstream.losses != pytest.approx(plain.losses, rel=1e-4), "no document ends in a sample"


def test_skipped_iterations_read_the_data_of_every_chunk(checkout: Path, tmp_path: Path) -> None:
    flags = "--iterations-to-skip 4"
    schedules = ("v-half", "zb-h1 on 4", "v-zb --enable-optimizer-post-validation")
    upstream = check_schedules(checkout, tmp_path / "start", flags, schedules, EIGHT_LAYERS)
    trained = set(upstream.losses)
    # One is left out: the fifth, or since 0.19 the fourth.
    assert len(set(range(3, max(trained))) - trained) == 1


def test_every_validation_set_is_evaluated_on_all_chunks(checkout: Path, tmp_path: Path) -> None:
    texts, left_out = make_texts(tmp_path), "--mock-data --split"
    flags = (
        f"--train-data-path {texts}_a --valid-data-path {texts}_b {texts}_c --eval-interval 2 "
        "--full-validation --multiple-validation-sets"
    )
    start = tmp_path / "start"
    assert not train(checkout, f"--save {start} --save-interval 2 --exit-interval 2").ended.code
    upstream = train(checkout, f"{flags} --load {start}", left_out=left_out)
    assert {name.split()[0] for name in upstream.evaluations} == {"validation-0", "validation-1"}
    for schedule in ("v-half", "zb-h1"):
        chosen = f"{flags} --load {start} --pipeline-schedule {schedule}"
        check_same(train(checkout, chosen, left_out=left_out), upstream)
